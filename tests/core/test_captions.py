from pathlib import Path

import pytest

from lowvram_lora.config import DataConfig
from lowvram_lora.data.captions import add_trigger, caption_suffixes, decode, read_caption

CHINESE = "一只橘猫坐在窗台上，阳光明媚"


def files_of(folder: Path) -> frozenset[Path]:
    return frozenset(folder.iterdir())


def caption_of(folder: Path, image: str, extension: str = "auto", custom: str = "") -> str:
    config = DataConfig(folder="", caption_extension=extension, custom_extension=custom)
    return read_caption(folder / image, caption_suffixes(config), files_of(folder)).text


def test_a_windows_apostrophe_is_read_and_named() -> None:
    """a09"""
    text, warning = decode(b"it\x92s a cat")
    assert text == "it’s a cat"
    assert "Windows-1252" in warning


@pytest.mark.parametrize("text", ["créée à l’été, répétée", "“quoted”… naïve – œuvre", "déjà vu", "Ünïcode ßtraße"])
def test_western_bytes_are_not_taken_for_chinese(text: str) -> None:
    assert decode(text.encode("cp1252"))[0] == text


@pytest.mark.parametrize("text", [CHINESE, "sks, 狗", "1girl, 红色的帽子 in a park"])
def test_gbk_captions_come_out_as_chinese(text: str) -> None:
    decoded, warning = decode(text.encode("gbk"))
    assert decoded == text
    assert "GB18030" in warning


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_unicode_needs_no_warning_and_leaves_no_mark(encoding: str) -> None:
    """a10"""
    assert decode(CHINESE.encode(encoding)) == (CHINESE, "")


def test_undefined_bytes_never_raise() -> None:
    for data in (b"\x81", b"\xff\xfe\x00", bytes(range(256)), b"cat \x8d\x9d"):
        assert isinstance(decode(data)[0], str)


def test_txt_comes_before_caption_and_either_alone_is_found(tmp_path: Path) -> None:
    """a13"""
    (tmp_path / "both.txt").write_text("from txt", encoding="utf-8")
    (tmp_path / "both.caption").write_text("from caption", encoding="utf-8")
    (tmp_path / "one.caption").write_text("only caption", encoding="utf-8")
    assert caption_of(tmp_path, "both.png") == "from txt"
    assert caption_of(tmp_path, "both.png", ".caption") == "from caption"
    assert caption_of(tmp_path, "one.png") == "only caption"
    assert caption_of(tmp_path, "one.png", ".txt") == ""


@pytest.mark.parametrize("custom", [".tags", "tags", " .tags "])
def test_an_ending_of_ones_own_comes_first(tmp_path: Path, custom: str) -> None:
    (tmp_path / "a.tags").write_text("from tags", encoding="utf-8")
    (tmp_path / "a.txt").write_text("from txt", encoding="utf-8")
    (tmp_path / "b.txt").write_text("b from txt", encoding="utf-8")
    assert caption_of(tmp_path, "a.png", custom=custom) == "from tags"
    assert caption_of(tmp_path, "b.png", custom=custom) == "b from txt"


def test_the_whole_name_counts(tmp_path: Path) -> None:
    """a15"""
    (tmp_path / "aaa.bbb.txt").write_text("b", encoding="utf-8")
    (tmp_path / "aaa.ccc.jpg.txt").write_text("c", encoding="utf-8")
    (tmp_path / "aaa.txt").write_text("wrong", encoding="utf-8")
    assert caption_of(tmp_path, "aaa.bbb.jpg") == "b"
    assert caption_of(tmp_path, "aaa.ccc.jpg") == "c"


def test_upper_case_endings_and_spaces(tmp_path: Path) -> None:
    (tmp_path / "my cat.TXT").write_text("  a cat \n", encoding="utf-8")
    assert caption_of(tmp_path, "my cat.png") == "a cat"


@pytest.mark.parametrize("suffix", [".txt", ".Txt", ".TXT"])
def test_the_case_of_a_caption_files_ending_does_not_matter(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"猫{suffix}").write_text("a cat", encoding="utf-8")
    assert caption_of(tmp_path, "猫.png") == "a cat"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_all_lines_are_kept_and_their_ends_do_not_matter(tmp_path: Path, end: str) -> None:
    (tmp_path / "a.txt").write_bytes(end.join(("a cat", "", "on a sill", "")).encode())
    assert caption_of(tmp_path, "a.png") == "a cat\n\non a sill"


def test_blank_is_found_and_missing_is_not(tmp_path: Path) -> None:
    """a11"""
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b" ")
    found = [read_caption(tmp_path / f"{name}.png", (".txt",), files_of(tmp_path)) for name in "abc"]
    assert [caption.text for caption in found] == ["", "", ""]
    assert [caption.source is not None for caption in found] == [True, True, False]


@pytest.mark.parametrize(
    ("caption", "trigger", "expected"),
    [
        ("a cat", "sks", "sks, a cat"),
        ("a SKS cat", "sks", "a SKS cat"),
        ("two desks", "sks", "sks, two desks"),
        ("一只sks猫", "sks", "一只sks猫"),
        ("可爱的猫咪", "猫咪", "可爱的猫咪"),
        ("一条狗", "猫咪", "猫咪, 一条狗"),
        ("", "sks", "sks"),
        ("a cat", "  ", "a cat"),
        ("a (cat)", "(cat)", "a (cat)"),
    ],
)
def test_the_trigger_word_goes_in_front_once(caption: str, trigger: str, expected: str) -> None:
    assert add_trigger(caption, trigger) == expected
    assert add_trigger(expected, trigger) == expected


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_mark_is_read_with_a_warning(encoding: str) -> None:
    text, warning = decode("a cat, 猫".encode(encoding))
    assert text == "a cat, 猫" and "UTF-16" in warning
