import io
import random
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, ImageFile

from lowvram_lora.data.pixels import decode, inspect, strict_decoding, to_pixels
from lowvram_lora.errors import PathError

WHITE = "#ffffff"


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def pixels(data: bytes, size_px: tuple[int, int], background: str = WHITE) -> torch.Tensor:
    return to_pixels(data, "a file", size_px, background)


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return a piece of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def halves(first: tuple[int, ...], second: tuple[int, ...], size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    """Return a picture of PIL size ``size`` whose left half is ``first`` and right half ``second``."""
    image = Image.new(mode, size, first)
    image.paste(second, (size[0] // 2, 0, size[0], size[1]))
    return image


def test_a_photo_turned_by_its_tag_is_upright() -> None:
    """a01: Orientation 6 means that the left of the stored picture is the top of the shown one."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(halves((255, 0, 0), (0, 0, 255), (40, 20)), "JPEG", exif=exif, quality=95)
    assert decode(data, "a").size_px == (40, 20)
    upright = pixels(data, (40, 20))
    assert upright.shape == (40, 20, 3)
    assert upright[4, 10, 0] > 0.9 > 0.1 > upright[4, 10, 2]
    assert upright[36, 10, 2] > 0.9 > 0.1 > upright[36, 10, 0]


def test_colours_below_transparency_do_not_show() -> None:
    """a02"""
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 4), dtype=np.uint8)
    noise[..., 3] = 0
    noise[4:12, 4:12] = (200, 100, 50, 255)
    data = saved(Image.fromarray(noise))
    white, green = pixels(data, (16, 16)), pixels(data, (16, 16), "#00ff00")
    assert torch.equal(white[:4], torch.ones(4, 16, 3))
    assert torch.equal(green[0, 0], torch.tensor([0.0, 1.0, 0.0]))
    expected = torch.tensor([200, 100, 50]) / 255
    torch.testing.assert_close(white[8, 8], expected)


def transparent_palette() -> bytes:
    image = Image.new("P", (16, 16), 0)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.paste(1, (8, 0, 16, 16))
    return saved(image, transparency=0)


def test_a_palette_with_a_transparent_colour_is_composited() -> None:
    got = pixels(transparent_palette(), (16, 16), "#00ff00")
    assert got[0, 0].tolist() == [0.0, 1.0, 0.0]
    assert got[0, 15].tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (saved(Image.new("L", (16, 16), 51)), [0.2, 0.2, 0.2]),
        (saved(Image.new("LA", (16, 16), (51, 255))), [0.2, 0.2, 0.2]),
        (saved(Image.new("1", (16, 16), 1)), [1.0, 1.0, 1.0]),
        (saved(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), "TIFF"), [0.0, 1.0, 1.0]),
        (saved(Image.fromarray(np.full((16, 16), 13107, dtype=np.uint16))), [0.2, 0.2, 0.2]),
        (saved(Image.fromarray(np.full((16, 16), 13107, dtype=np.uint16)), "TIFF"), [0.2, 0.2, 0.2]),
        (saved(Image.fromarray(np.full((16, 16), 0.2, dtype=np.float32)), "TIFF"), [0.2, 0.2, 0.2]),
    ],
    ids=["L", "LA", "1", "CMYK", "I;16 png", "I;16 tiff", "F"],
)
def test_every_mode_becomes_rgb_in_0_to_1(data: bytes, expected: list[float]) -> None:
    """a32"""
    got = pixels(data, (16, 24))
    assert got.shape == (16, 24, 3)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got[8, 12], torch.tensor(expected), atol=1e-6, rtol=0)


def test_16_bit_keeps_its_steps() -> None:
    ramp = np.tile(np.linspace(0, 65535, 64).astype(np.uint16), (64, 1))
    got = pixels(saved(Image.fromarray(ramp)), (64, 64))
    torch.testing.assert_close(got[0, :, 1], torch.linspace(0, 1, 64), atol=1e-4, rtol=0)


def test_the_crop_is_the_centre() -> None:
    image = Image.new("RGB", (100, 20), (255, 0, 0))
    image.paste((0, 255, 0), (35, 0, 65, 20))
    got = pixels(saved(image), (20, 20))
    assert torch.equal(got, torch.tensor([0.0, 1.0, 0.0]).expand(20, 20, 3))


def test_the_right_size_is_left_alone() -> None:
    values = np.random.default_rng(1).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    got = pixels(saved(Image.fromarray(values)), (24, 40))
    assert torch.equal(got, torch.from_numpy(values).float() / 255)


def test_odd_sizes_never_leave_the_picture() -> None:
    for width, height in ((333, 777), (1, 1), (7, 3), (1999, 201)):
        data = saved(Image.new("RGB", (width, height), (10, 20, 30)))
        assert pixels(data, (64, 192)).shape == (64, 192, 3)


def test_a_cut_off_file_is_refused_even_if_another_pack_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """a04"""
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    noise = np.random.default_rng(2).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = saved(Image.fromarray(noise), "JPEG")
    with pytest.raises(PathError, match="damaged or cut off"):
        decode(data[: len(data) * 7 // 10], "cut.jpg")
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


def test_animation_is_told() -> None:
    frames = [Image.new("RGB", (16, 16), (255 - 80 * i, 80 * i, 0)) for i in range(3)]
    for kind in ("GIF", "WEBP"):
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:])
        assert decode(data, "a").is_animated
        assert pixels(data, (16, 16))[8, 8, 0] > 0.9
    assert not decode(saved(frames[0]), "a").is_animated


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_scan_sees_the_size_that_decoding_gives(kind: str, orientation: int) -> None:
    """a01: the scan makes only some of a JPEG's pixels."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(Image.new("RGB", (403, 207)), kind, exif=exif)
    facts = inspect(data, "a")
    assert facts.size_px == decode(data, "a").size_px
    assert facts.size_px == ((207, 403) if orientation <= 4 else (403, 207))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "QOI", "JPEG2000", "TGA", "AVIF"])
def test_a_scan_refuses_what_decoding_refuses(kind: str) -> None:
    """a04: whatever is cut off."""
    noise = np.random.default_rng(2).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    whole = saved(Image.fromarray(noise), kind)
    name = f"cut.{kind.lower()}"
    with strict_decoding():
        assert inspect(whole, name).size_px == (64, 64)
    for share in (0.1, 0.5, 0.9, 0.98):
        cut = whole[: int(len(whole) * share)]
        for read in (decode, inspect):
            with strict_decoding(), pytest.raises(PathError, match=r"damaged or cut off|not a picture"):
                read(cut, name)


def test_pictures_are_told_by_content_and_no_decoder_that_starts_a_program_is_asked() -> None:
    assert decode(saved(Image.new("RGB", (8, 8)), "JPEG"), "a.png").size_px == (8, 8)
    with pytest.raises(PathError, match="not a picture that can be read here"):
        decode(saved(Image.new("RGB", (8, 8)), "EPS"), "a.png")


def test_a_photo_format_that_is_not_known_here_is_named() -> None:
    with pytest.raises(PathError, match="HEIC"):
        decode(struct.pack(">I", 24) + b"ftypheic" + b"\0" * 100, "IMG_1.HEIC")


def test_colours_that_no_network_knows_are_refused_when_scanned() -> None:
    lab = saved(ImageCms.profileToProfile(Image.new("RGB", (8, 8)), *profiles("sRGB", "LAB"), outputMode="LAB"), "TIFF")
    for read in (decode, inspect):
        with pytest.raises(PathError, match="Lab"):
            read(lab, "a.tif")


def profiles(*names: str) -> list[ImageCms.ImageCmsProfile]:
    return [ImageCms.ImageCmsProfile(ImageCms.createProfile(name)) for name in names]


def wide_profile() -> bytes:
    """Return a profile like sRGB's, but with red where green is and the other way round."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    red, green = profile.find(b"rXYZ", 128), profile.find(b"gXYZ", 128)
    profile[red : red + 4], profile[green : green + 4] = b"gXYZ", b"rXYZ"
    return bytes(profile).replace("sRGB".encode("utf-16-be"), "odd!".encode("utf-16-be")).replace(b"sRGB", b"odd!")


def test_an_embedded_colour_profile_is_followed_also_below_transparency() -> None:
    """A file may call any numbers red; what the eye sees is what is trained on."""
    red = Image.new("RGB", (8, 8), (255, 0, 0))
    plain = pixels(saved(red, icc_profile=profiles("sRGB")[0].tobytes()), (8, 8))
    assert plain[0, 0].tolist() == [1.0, 0.0, 0.0]
    odd = pixels(saved(red, icc_profile=wide_profile()), (8, 8))
    torch.testing.assert_close(odd[0, 0], torch.tensor([0.0, 1.0, 0.0]), atol=0.02, rtol=0)
    half = red.convert("RGBA")
    half.putalpha(0)
    assert pixels(saved(half, icc_profile=wide_profile()), (8, 8), "#0000ff")[0, 0].tolist() == [0.0, 0.0, 1.0]


def test_a_damaged_colour_profile_is_passed_over() -> None:
    data = saved(Image.new("RGB", (8, 8), (255, 0, 0)), icc_profile=b"no profile")
    assert pixels(data, (8, 8))[0, 0].tolist() == [1.0, 0.0, 0.0]


def test_16_bit_colour_is_scaled_or_refused_and_never_clipped() -> None:
    """a32: a PNG of three 16-bit channels, written by hand since Pillow writes none."""
    row = b"\0" + struct.pack(">HHH", 0x8000, 0x2000, 0xFFFF) * 8
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0))
    data = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(row * 8)) + chunk(b"IEND", b"")
    got = pixels(data, (8, 8))[4, 4]
    torch.testing.assert_close(got, torch.tensor([0.5, 0.125, 1.0]), atol=1 / 255, rtol=0)


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGB", "RGBA", "I;16"])
@pytest.mark.parametrize("size", [(1, 1), (7, 5), (64, 33), (1000, 700)])
def test_a_scan_finds_every_whole_png_whole_and_every_cut_one_cut(mode: str, size: tuple[int, int]) -> None:
    """Its pixels are not made; the file's end may be missing as long as the picture is there."""
    noise = np.random.default_rng(3).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    whole = saved(Image.fromarray(noise).convert("L" if mode == "I;16" else mode).convert(mode))
    facts = inspect(whole, "a.png")
    assert facts.size_px == (size[1], size[0])
    assert facts.has_alpha == (mode in ("LA", "RGBA"))
    for cut in range(1, len(whole), max(len(whole) // 40, 1)):
        outcomes = []
        for read in (decode, inspect):
            try:
                with strict_decoding():
                    outcomes.append(read(whole[:cut], "a.png").size_px)
            except PathError:
                outcomes.append(None)
        assert outcomes[0] == outcomes[1] or outcomes[1] is None, cut


def test_a_png_damaged_inside_is_found_by_a_scan() -> None:
    noise = np.random.default_rng(3).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = bytearray(saved(Image.fromarray(noise)))
    data[len(data) // 2] ^= 0xFF
    with pytest.raises(PathError, match="damaged"):
        inspect(bytes(data), "a.png")


def test_a_png_that_swells_to_more_than_its_size_is_not_unpacked_whole() -> None:
    """A picture of 8 x 8 with a quarter of a gigabyte of data behind it."""
    stream = bytearray()
    packer = zlib.compressobj(1)
    for _ in range(16):
        stream += packer.compress(bytes(1 << 24))
    stream += packer.flush()
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0))
    data = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", bytes(stream)) + chunk(b"IEND", b"")
    tracemalloc.start()
    assert inspect(data, "a.png").size_px == (8, 8)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 * 2**20


KINDS = (
    "AVIF",
    "BMP",
    "DDS",
    "GIF",
    "ICO",
    "JPEG",
    "JPEG2000",
    "MPO",
    "PCX",
    "PNG",
    "PPM",
    "QOI",
    "SGI",
    "TIFF",
    "WEBP",
)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_with_wrong_bytes_ends_in_a_sentence_and_a_scan_and_decoding_agree(kind: str) -> None:
    source = random.Random(kind)
    noise = np.random.default_rng(4).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    whole = saved(Image.fromarray(noise), kind)
    for _ in range(40):
        data = bytearray(whole)
        for _ in range(source.choice((1, 3, 20))):
            data[source.randrange(min(len(data), source.choice((64, 200, len(data)))))] = source.randrange(256)
        sizes: list[tuple[int, int] | None] = []
        for read in (inspect, decode):
            try:
                with strict_decoding():
                    sizes.append(read(bytes(data), "a").size_px)
                assert pixels(bytes(data), (16, 16)).isfinite().all()
            except PathError as error:
                sizes.append(None)
                assert len(error.reason.split()) > 3
        assert sizes[0] == sizes[1]


def test_interlaced_and_moving_pngs_are_read() -> None:
    frames = [Image.new("RGB", (16, 16), (255 - 80 * i, 80 * i, 0)) for i in range(3)]
    facts = inspect(saved(frames[0], save_all=True, append_images=frames[1:]), "a.png")
    assert facts.is_animated
    # Adam7 of a single pixel: one pass of one row.
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 1))
    data = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0\1\2\3")) + chunk(b"IEND", b"")
    assert inspect(data, "a.png").size_px == (1, 1)
