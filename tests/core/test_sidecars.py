"""metadata.jsonl and metadata.csv beside the images."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Literal

import pytest
from PIL import Image

from lowvram_lora.config import DataConfig
from lowvram_lora.data.scan import Dataset, folder_fingerprint, scan


def pictures(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64)).save(folder / name)
    return folder


def scan_in(root: Path, **options: object) -> Dataset:
    return scan(DataConfig(folder=".", **options), [root])


def captions(dataset: Dataset) -> dict[str, tuple[str, ...]]:
    return {sample.name: sample.captions for sample in dataset.samples}


def jsonl(folder: Path, *rows: object) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    (folder / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")


def note_about(dataset: Dataset, text: str) -> str:
    (note,) = [note for note in dataset.notes if text in note]
    return note


def test_rows_give_captions_also_for_images_in_folders_below(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png", "sub dir/猫.png", "c.png")
    jsonl(
        tmp_path,
        {"file_name": "a.png", "text": " a cat "},
        {"file_name": "sub dir\\猫.png", "caption": "一只猫"},
    )
    dataset = scan_in(tmp_path)
    assert captions(dataset) == {"a.png": ("a cat",), "c.png": ("",), "sub dir/猫.png": ("一只猫",)}
    assert "captions found 2 of 3" in dataset.notes
    assert "no caption: 1 (c.png)" in dataset.notes


def test_an_image_may_have_several_captions(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png", "b.png", "c.png")
    jsonl(
        tmp_path,
        {"file_name": "a.png", "captions": ["one", "two", "one"]},
        {"file_name": "b.png", "text": "first", "text_2": "second"},
        {"file_name": "c.png", "text": "early"},
        {"file_name": "c.png", "text": "late"},
    )
    assert captions(scan_in(tmp_path, trigger_word="sks")) == {
        "a.png": ("sks, one", "sks, two"),
        "b.png": ("sks, first", "sks, second"),
        "c.png": ("sks, early", "sks, late"),
    }


def test_a_caption_file_beside_the_image_wins_and_that_is_told(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png")
    (tmp_path / "a.txt").write_text("from the file", encoding="utf-8")
    jsonl(tmp_path, {"file_name": "a.png", "text": "from the row"})
    dataset = scan_in(tmp_path)
    assert captions(dataset) == {"a.png": ("from the file",)}
    assert "1 (a.png)" in note_about(dataset, "sidecar")


def test_broken_lines_are_named_by_number_and_the_others_used(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png", "b.png")
    jsonl(
        tmp_path,
        {"file_name": "a.png", "text": "a"},
        '{"file_name": "b.png", "text": ',
        "",
        "[1, 2]",
        {"text": "whose?"},
        {"file_name": "b.png"},
        {"file_name": "b.png", "text": 7},
        "[" * 100_000,
        {"file_name": "b.png", "text": "b"},
    )
    dataset = scan_in(tmp_path)
    assert captions(dataset) == {"a.png": ("a",), "b.png": ("b",)}
    assert "metadata.jsonl line 2, 8: is no JSON; the row is left out" in dataset.notes
    assert "metadata.jsonl line 4: is no JSON object; the row is left out" in dataset.notes
    assert "metadata.jsonl line 5: has no file_name; the row is left out" in dataset.notes
    assert "metadata.jsonl line 6, 7: has no text or caption; the row is left out" in dataset.notes


@pytest.mark.parametrize(("picture_form", "row_form"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_row_finds_its_image_however_a_system_spells_accents(
    tmp_path: Path, picture_form: Literal["NFC", "NFD"], row_form: Literal["NFC", "NFD"]
) -> None:
    name = "Höhe/Müller é.png"
    pictures(tmp_path, unicodedata.normalize(picture_form, name))
    jsonl(tmp_path, {"file_name": unicodedata.normalize(row_form, name), "text": "a portrait"})
    assert list(captions(scan_in(tmp_path)).values()) == [("a portrait",)]


def test_rows_for_files_that_are_not_there_and_rows_that_repeat_are_named(tmp_path: Path) -> None:
    pictures(tmp_path / "set", "a.png")
    pictures(tmp_path, "secret.png")
    jsonl(
        tmp_path / "set",
        {"file_name": "gone.png", "text": "x"},
        {"file_name": "../secret.png", "text": "x"},
        {"file_name": str(tmp_path / "secret.png"), "text": "x"},
        {"file_name": "C:\\secret.png", "text": "x"},
        {"file_name": "a.png", "text": "a"},
        {"file_name": "a.png", "text": "a"},
    )
    dataset = scan(DataConfig(folder="set"), [tmp_path])
    assert captions(dataset) == {"a.png": ("a",)}
    assert "metadata.jsonl line 1 (gone.png): there is no such file; the row is left out" in dataset.notes
    assert "../secret.png" in note_about(dataset, "outside its folder")
    assert note_about(dataset, "outside its folder").count("(") == 3
    assert "metadata.jsonl line 6 (a.png): repeats an earlier row" in dataset.notes


def test_many_bad_rows_make_one_note(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png")
    jsonl(tmp_path, *({"file_name": f"{number}.png", "text": "x"} for number in range(1000)))
    assert note_about(scan_in(tmp_path), "no such file").endswith(
        "and 995 more: there is no such file; the row is left out"
    )


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_table_is_read_as_spreadsheets_save_it(tmp_path: Path, encoding: str, delimiter: str, end: str) -> None:
    pictures(tmp_path, "a b.png", "猫.png")
    rows = [["File_Name", "caption"], ["a b.png", '"a cat, sitting; still"'], ["猫.png", '"said ""miaow"""']]
    text = end.join(delimiter.join(row) for row in rows) + end
    (tmp_path / "metadata.csv").write_bytes(text.encode(encoding))
    dataset = scan_in(tmp_path)
    assert captions(dataset) == {"a b.png": ("a cat, sitting; still",), "猫.png": ('said "miaow"',)}
    assert not [note for note in dataset.notes if "metadata.csv" in note]


def test_a_table_in_an_old_code_page_is_read_with_a_warning(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png")
    (tmp_path / "metadata.csv").write_bytes("sep=;\nfile_name;text\na.png;créée à l’été".encode("cp1252"))
    dataset = scan_in(tmp_path)
    assert captions(dataset) == {"a.png": ("créée à l’été",)}
    assert "Windows-1252" in note_about(dataset, "metadata.csv")


def test_rows_of_another_length_are_named_by_line(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png", "b.png")
    (tmp_path / "metadata.csv").write_text(
        'file_name,text\na.png,a cat, sitting\nb.png,"two\nlines"\nb.png\n', encoding="utf-8"
    )
    dataset = scan_in(tmp_path)
    assert captions(dataset) == {"a.png": ("",), "b.png": ("two\nlines",)}
    assert "metadata.csv line 2: has 3 cells where the first line has 2" in note_about(dataset, "3 cells")
    assert "line 5: has 1 cells" in note_about(dataset, "1 cells")


@pytest.mark.parametrize("text", ["", "a.png,a cat\n", "name;words\na.png;x", "\0\0\0"])
def test_a_table_without_column_names_says_what_they_must_be(tmp_path: Path, text: str) -> None:
    pictures(tmp_path, "a.png")
    (tmp_path / "metadata.csv").write_text(text, encoding="utf-8")
    assert "file_name,text" in note_about(scan_in(tmp_path), "metadata.csv")


def test_a_cell_that_never_ends_does_not_end_the_scan(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png")
    (tmp_path / "metadata.csv").write_text('file_name,text\na.png,"' + "x" * 200_000, encoding="utf-8")
    assert "can't be read" in note_about(scan_in(tmp_path), "metadata.csv")


def test_halves_of_characters_do_not_reach_the_text_encoder(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png")
    jsonl(tmp_path, '{"file_name": "a.png", "text": "a \\ud83d cat"}')
    (caption,) = captions(scan_in(tmp_path))["a.png"]
    assert caption.encode("utf-8").startswith(b"a ")


def test_an_edited_sidecar_is_noticed(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png")
    config = DataConfig(folder=".")
    before = folder_fingerprint(config, [tmp_path])
    jsonl(tmp_path, {"file_name": "a.png", "text": "one"})
    after = folder_fingerprint(config, [tmp_path])
    jsonl(tmp_path, {"file_name": "a.png", "text": "another"})
    assert len({before, after, folder_fingerprint(config, [tmp_path])}) == 3
