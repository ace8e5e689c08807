"""Data sets from strangers: opened lazily in a stable order, bad files counted by name, the rest refused."""

import hashlib
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from audit.dataset import Dataset, dataset_of_images, guarded, open_dataset, read_csv, write_csv
from engine.errors import ImageError, InputError

SIZE = 16


def _png(file: Path, grey: int = 0, side: int = 20) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (side, side), grey).save(file)


def _greys(dataset: Dataset) -> list[int]:
    return (dataset.images(range(len(dataset))).mean((1, 2, 3)) * 255).round().int().tolist()


def _manifest(folder: Path, text: str, name: str = "data.csv") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """Four pictures whose order of rows is not that of their names."""
    for name, grey in (("d", 40), ("a", 10), ("c", 30), ("b", 20)):
        _png(tmp_path / "pictures" / f"{name}.png", grey)
    return _manifest(
        tmp_path,
        "image,label,beard,site,split\n"
        "pictures/d.png,blond,1,004,test\n"
        "./pictures/a.png,dark,0,007,train\n"
        "pictures/c.png,dark,,120,test\n"
        "pictures/b.png,blond,1,007,train\n",
    )


# Manifests -------------------------------------------------------------------------------------------------------


def test_a_manifest_keeps_its_order_its_types_and_its_names(manifest: Path) -> None:
    dataset = open_dataset(manifest, size=SIZE)
    assert dataset.table["image"].tolist() == [f"pictures/{name}.png" for name in "dacb"]
    assert list(dataset.table) == ["image", "label", "beard", "site", "split"]
    assert dataset.labels == ("blond", "dark")
    assert dataset.group_columns == ("beard", "site")
    assert dataset.table["beard"].isna().tolist() == [False, False, True, False]
    assert dataset.table["beard"].iloc[0] == 1
    assert dataset.table["site"].tolist() == ["004", "007", "120", "007"]
    assert dataset.images([0, 2]).shape == (2, 3, SIZE, SIZE)
    assert dataset.images([]).shape == (0, 3, SIZE, SIZE)
    assert _greys(dataset) == [40, 10, 30, 20]


def test_csv_and_parquet_of_one_table_are_one_data_set(manifest: Path) -> None:
    dataset = open_dataset(manifest, size=SIZE)
    other = manifest.with_name("data.parquet")
    dataset.table.to_parquet(other, index=False)
    again = open_dataset(other, size=SIZE)
    pd.testing.assert_frame_equal(dataset.table, again.table, check_dtype=False)
    assert dataset.content_hash == again.content_hash


def test_a_split_and_columns_are_chosen_by_name(manifest: Path) -> None:
    dataset = open_dataset(manifest, size=SIZE, split="test", label_column="site", group_columns=[])
    assert dataset.labels == ("004", "120")
    assert dataset.group_columns == ()
    assert _greys(dataset) == [40, 30]
    with pytest.raises(InputError, match="no split 'val'; it has: 'test', 'train'"):
        open_dataset(manifest, size=SIZE, split="val")


def test_whole_numbers_in_parquet_are_labels_as_people_write_them(tmp_path: Path) -> None:
    names = ["a.png", "b.png", "c.png"]
    for column in ([0, 10, 2], [0.0, 10.0, 2.0]):
        pd.DataFrame({"image": names, "label": column}).to_parquet(tmp_path / "m.parquet")
        assert open_dataset(tmp_path / "m.parquet", size=SIZE).labels == ("0", "2", "10")
    table = pa.table({"image": names, "label": pa.array(["x", "y", "x"]).dictionary_encode(), "box": [[1], [2], [3]]})
    pq.write_table(table, tmp_path / "m.parquet")
    dataset = open_dataset(tmp_path / "m.parquet", size=SIZE)
    assert (dataset.labels, dataset.group_columns) == (("x", "y"), ())


def test_labels_in_csv_stay_as_they_are_written(tmp_path: Path) -> None:
    dataset = open_dataset(_manifest(tmp_path, "image,label\na.png,1.50\nb.png,NA\n"), size=SIZE)
    assert dataset.table["label"].tolist() == ["1.50", "NA"]


def test_empty_cells_and_short_lines_are_missing_values(tmp_path: Path) -> None:
    file = _manifest(tmp_path, "image,label,site,note,tail\na.png,x,1,,left\n\nb.png,y,2\n")
    table = open_dataset(file, size=SIZE).table
    assert table["site"].tolist() == [1, 2]
    assert table["note"].isna().all()
    assert table["tail"].isna().tolist() == [False, True]


def test_columns_without_a_name_are_left_out(tmp_path: Path) -> None:
    file = _manifest(tmp_path, ",image,label,,\n0,a.png,x,,\n1,b.png,y,,stray\n")
    assert list(open_dataset(file, size=SIZE).table) == ["image", "label"]


def test_a_folder_with_a_manifest_is_that_manifest(manifest: Path) -> None:
    renamed = manifest.rename(manifest.with_name("manifest.csv"))
    assert open_dataset(renamed.parent, size=SIZE).content_hash == open_dataset(renamed, size=SIZE).content_hash


def test_labels_can_be_left_out(manifest: Path) -> None:
    dataset = open_dataset(manifest, size=SIZE, labelled=False)
    assert dataset.labels == ()
    assert dataset.table["label"].isna().all()
    dataset.check_labels(["anything", "else"])
    with pytest.raises(InputError, match="no labels"):
        dataset.label_indices(["anything", "else"])


REFUSED = {
    "no column": ("image,class\na.png,x\n", "no column 'label'; the columns that can be read are: 'image', 'class'"),
    "semicolons": ("image;label\na.png;x\n", "no column 'image'.*'image;label'"),
    "nothing": ("", "is empty"),
    "header alone": ("image,label\n", "lists no pictures"),
    "too many cells": ("image,label\na.png,x,y\n", "as many cells in each line: Expected 2 fields in line 2, saw 3"),
    "open quote": ('image,label\n"a.png,x\n', "no table with commas"),
    "two columns of a name": ("image,label,label\na.png,x,y\n", "two columns named 'label'"),
    "no label": ("image,label\na.png,x\nb.png,\n", "no label in row 2"),
    "no name": ("image,label\n,x\n", "no image in row 1"),
    "one class": ("image,label\na.png,x\nb.png,x\n", "All 2 pictures .* 'x'.*at least two labels"),
    "twice": ("image,label\na.png,x\nb.png,y\n./a.png,y\n", r"a\.png twice, in rows 1 and 3"),
    "parent": ("image,label\na.png,x\n../b.png,y\n", r"\.\./b\.png, which leads out"),
    "hidden parent": ("image,label\na.png,x\nc/../../b.png,y\n", "which leads out"),
    "absolute": ("image,label\na.png,x\n/etc/passwd,y\n", "/etc/passwd, which leads out"),
    "NUL": ("image,label\na.png,x\nb\0.png,y\n", "NUL"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_manifest_that_cannot_be_used_is_refused_with_one_sentence(tmp_path: Path, case: str) -> None:
    text, words = REFUSED[case]
    file = _manifest(tmp_path, text)
    with pytest.raises(InputError, match=words) as refused:
        open_dataset(file, size=SIZE)
    assert "data.csv" in str(refused.value)


def test_a_csv_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_bytes("image,label\na.png,x\nb.png,grün\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"not UTF-8 text \(line 3\)"):
        open_dataset(tmp_path / "data.csv", size=SIZE)
    (tmp_path / "data.csv").write_bytes("image,label\na.png,x\nb.png,grün\n".encode("utf-8-sig"))
    assert open_dataset(tmp_path / "data.csv", size=SIZE).labels == ("grün", "x")


def test_what_is_no_parquet_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"image,label\na.png,x\n", b"PAR1" + bytes(40) + b"PAR1"):
        (tmp_path / "data.parquet").write_bytes(content)
        with pytest.raises(InputError, match="cannot be read as Parquet"):
            open_dataset(tmp_path / "data.parquet", size=SIZE)
    whole = tmp_path / "whole.parquet"
    pd.DataFrame({"image": ["a.png", "b.png"], "label": ["x", "y"]}).to_parquet(whole)
    (tmp_path / "data.parquet").write_bytes(whole.read_bytes()[:-30])
    with pytest.raises(InputError, match="cannot be read as Parquet"):
        open_dataset(tmp_path / "data.parquet", size=SIZE)


def test_pictures_inside_a_parquet_file_are_no_paths(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [{"bytes": b"x"}], "label": ["x"]}), tmp_path / "data.parquet")
    with pytest.raises(InputError, match="no column 'image'"):
        open_dataset(tmp_path / "data.parquet", size=SIZE)


def test_sources_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for source, words in (
        (tmp_path / "notes.txt", "no manifest"),
        (tmp_path / "nowhere", "does not exist"),
        ("https://example.org/data.csv", "does not exist"),
        (tmp_path, "holds no pictures"),
    ):
        with pytest.raises(InputError, match=words):
            open_dataset(source, size=SIZE)


def test_symbolic_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    _png(tmp_path / "elsewhere" / "secret.png", 99)
    inside = tmp_path / "data"
    _png(inside / "x" / "a.png", 10)
    _png(inside / "y" / "b.png", 20)
    (inside / "y" / "c.png").symlink_to(inside / "x" / "a.png")
    assert _greys(open_dataset(inside, size=SIZE)) == [10, 20, 10]
    (inside / "y" / "link.png").symlink_to(tmp_path / "elsewhere" / "secret.png")
    with pytest.raises(InputError, match=r"y/link\.png, a symbolic link"):
        open_dataset(inside, size=SIZE)
    assert _greys(open_dataset(inside, size=SIZE, allow_outside=True)) == [10, 20, 10, 99]
    (inside / "y" / "link.png").unlink()
    (inside / "z").symlink_to(tmp_path / "elsewhere")
    manifest = _manifest(inside, "image,label\nx/a.png,x\nz/secret.png,z\n")
    for source in (inside, manifest):
        with pytest.raises(InputError, match=r"z/secret\.png, a symbolic link"):
            open_dataset(source, size=SIZE)


def test_absolute_paths_are_opened_where_that_is_allowed(tmp_path: Path) -> None:
    _png(tmp_path / "elsewhere" / "a.png", 10)
    _png(tmp_path / "data" / "b.png", 20)
    file = _manifest(tmp_path / "data", f"image,label\n{tmp_path / 'elsewhere' / 'a.png'},x\nb.png,y\n")
    assert _greys(open_dataset(file, size=SIZE, allow_outside=True)) == [10, 20]


def test_a_data_folder_that_is_itself_a_link_is_opened(tmp_path: Path, manifest: Path) -> None:
    (tmp_path / "link").symlink_to(manifest.parent)
    assert _greys(open_dataset(tmp_path / "link" / manifest.name, size=SIZE)) == [40, 10, 30, 20]


# Formulas --------------------------------------------------------------------------------------------------------


def test_a_formula_stays_text_and_is_guarded_when_written(tmp_path: Path) -> None:
    formula = '=HYPERLINK("http://example.org","x")'
    quoted = formula.replace('"', '""')
    file = _manifest(tmp_path, f'image,label,note\na.png,x,"{quoted}"\nb.png,y,@sum\n')
    table = open_dataset(file, size=SIZE).table
    assert table["note"].tolist() == [formula, "@sum"]
    write_csv(table, tmp_path / "out" / "safe.csv")
    cells = pd.read_csv(tmp_path / "out" / "safe.csv", dtype=str)
    assert cells["note"].tolist() == ["'" + formula, "'@sum"]
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["safe.csv"]


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    text = ["=1+1", "'=1+1", "''-x", "'", "it's", "-1", "-x", "+49", "@", "\tx", "\rx", "two\nlines", 'a"b,c', "grün"]
    table = pd.DataFrame({"text": text, "=name": range(len(text)), "float": np.linspace(-1, 1, len(text))})
    write_csv(table, tmp_path / "table.csv")
    again = read_csv(tmp_path / "table.csv")
    assert again["text"].tolist() == text
    assert again["=name"].tolist() == list(range(len(text)))
    assert np.allclose(again["float"].astype(float), table["float"])
    assert (guarded("-1.5"), guarded("-1+1"), guarded("plain")) == ("-1.5", "'-1+1", "plain")


# Folders ---------------------------------------------------------------------------------------------------------


def test_class_folders_are_labels_in_the_order_of_names(tmp_path: Path) -> None:
    for name, grey in (("dog/b.png", 4), ("cat/b.jpg", 2), ("cat/a.png", 1), ("dog/a.png", 3), ("dog/z/a.png", 5)):
        _png(tmp_path / name, grey)
    _png(tmp_path / ".hidden" / "x.png")
    _png(tmp_path / "__MACOSX" / "x.png")
    (tmp_path / "dog" / "notes.txt").write_text("not a picture")
    dataset = open_dataset(tmp_path, size=SIZE)
    assert dataset.table["image"].tolist() == ["cat/a.png", "cat/b.jpg", "dog/a.png", "dog/b.png", "dog/z/a.png"]
    assert dataset.table["label"].tolist() == ["cat", "cat", "dog", "dog", "dog"]
    assert _greys(dataset) == [1, 2, 3, 4, 5]
    with pytest.raises(InputError, match="has no columns"):
        open_dataset(tmp_path, size=SIZE, label_column="label")
    with pytest.raises(InputError, match="has no splits"):
        open_dataset(tmp_path, size=SIZE, split="test")
    _png(tmp_path / "stray.png")
    with pytest.raises(InputError, match="beside class folders"):
        open_dataset(tmp_path, size=SIZE)


def test_split_folders_stand_above_class_folders(tmp_path: Path) -> None:
    for name in ("train/x/a.png", "train/y/b.png", "test/x/a.png", "test/y/b.png"):
        _png(tmp_path / name)
    assert open_dataset(tmp_path, size=SIZE).labels == ("x", "y")
    chosen = open_dataset(tmp_path, size=SIZE, split="test")
    assert chosen.table["image"].tolist() == ["test/x/a.png", "test/y/b.png"]


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    for name in ("b.png", "a.png"):
        _png(tmp_path / name)
    dataset = open_dataset(tmp_path, size=SIZE)
    assert dataset.table["image"].tolist() == ["a.png", "b.png"]
    assert dataset.labels == ()
    assert dataset.table["label"].isna().all()


def test_one_class_folder_alone_is_refused(tmp_path: Path) -> None:
    _png(tmp_path / "cat" / "a.png")
    with pytest.raises(InputError, match="'cat'; an audit needs at least two"):
        open_dataset(tmp_path, size=SIZE)


# CelebA ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def celeba(tmp_path: Path) -> Path:
    """CelebA's files with four pictures and three attributes."""
    attributes = ["4", "Blond_Hair Male Smiling "]
    for number, (blond, male, smiling) in enumerate([(1, -1, 1), (-1, 1, 1), (-1, -1, -1), (1, 1, -1)], start=1):
        _png(tmp_path / "img_align_celeba" / f"{number:06d}.jpg", 10 * number)
        attributes.append(f"{number:06d}.jpg {blond:2d} {male:2d} {smiling:2d}")
    (tmp_path / "list_attr_celeba.txt").write_text("\n".join(attributes) + "\n")
    splits = "000001.jpg 0\n000002.jpg 0\n000003.jpg 1\n000004.jpg 2\n"
    (tmp_path / "list_eval_partition.txt").write_text(splits)
    return tmp_path


def test_celeba_as_published(celeba: Path) -> None:
    dataset = open_dataset(celeba, size=SIZE)
    assert dataset.labels == ("not Blond_Hair", "Blond_Hair")
    assert dataset.table.to_dict("list") == {
        "image": [f"img_align_celeba/00000{n}.jpg" for n in (1, 2, 3, 4)],
        "label": ["Blond_Hair", "not Blond_Hair", "not Blond_Hair", "Blond_Hair"],
        "Male": [0, 1, 0, 1],
        "split": ["train", "train", "val", "test"],
    }
    assert dataset.group_columns == ("Male",)
    assert _greys(dataset) == [10, 20, 30, 40]
    smiling = open_dataset(celeba, size=SIZE, split="train", label_column="Male", group_columns=["Smiling"])
    assert smiling.table["label"].tolist() == ["not Male", "Male"]
    assert smiling.table["Smiling"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("list_attr_celeba.txt", "Male", "Female", "no attribute 'Male'; it has: Blond_Hair, Female, Smiling"),
        ("list_attr_celeba.txt", "4\n", "5\n", "promises 5 pictures in its first line and lists 4"),
        ("list_attr_celeba.txt", "4\n", "", "has to begin with the number"),
        ("list_attr_celeba.txt", "000003.jpg -1", "000003.jpg  0", "line 5"),
        ("list_attr_celeba.txt", "000002.jpg -1", "000002.jpg", "line 4"),
        ("list_attr_celeba.txt", "000002.jpg", "../../x.jpg", "names no split for ../../x.jpg"),
        ("list_eval_partition.txt", "000003.jpg 1", "000003.jpg 7", "line 3"),
    ],
)
def test_celeba_that_was_altered_is_refused(celeba: Path, file: str, old: str, new: str, words: str) -> None:
    text = (celeba / file).read_text()
    (celeba / file).write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=words):
        open_dataset(celeba, size=SIZE)


def test_celeba_without_a_part_is_refused_by_its_name(celeba: Path) -> None:
    (celeba / "list_eval_partition.txt").unlink()
    with pytest.raises(InputError, match=r"lacks list_eval_partition\.txt"):
        open_dataset(celeba, size=SIZE)


# Camelyon17 ------------------------------------------------------------------------------------------------------


@pytest.fixture
def camelyon17(tmp_path: Path) -> Path:
    """Camelyon17-WILDS' files with five patches of three hospitals."""
    lines = [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    patches = [("004", 4, 1, 0, 0, 0), ("004", 4, 0, 0, 0, 1), ("020", 2, 1, 9, 1, 0), ("042", 3, 0, 23, 2, 1)]
    for row, (patient, node, tumor, slide, center, split) in enumerate(patches):
        x, y = 3328 + row, 21792
        lines.append(f"{row},{patient},{node},{x},{y},{tumor},{slide},{center},{split}")
        place = f"patient_{patient}_node_{node}"
        _png(tmp_path / "patches" / place / f"patch_{place}_x_{x}_y_{y}.png", 10 * (row + 1), side=96)
    (tmp_path / "metadata.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_camelyon17_as_published(camelyon17: Path) -> None:
    dataset = open_dataset(camelyon17, size=SIZE)
    assert dataset.labels == ("normal", "tumor")
    assert list(dataset.table) == ["image", "label", "center", "slide", "patient", "node", "split"]
    assert dataset.table["image"].iloc[0] == "patches/patient_004_node_4/patch_patient_004_node_4_x_3328_y_21792.png"
    assert dataset.table["label"].tolist() == ["tumor", "normal", "tumor", "normal"]
    assert dataset.table["center"].tolist() == [0, 0, 1, 2]
    assert dataset.table["split"].tolist() == ["train", "id_val", "val", "test"]
    assert _greys(dataset) == [10, 20, 30, 40]
    assert open_dataset(camelyon17, size=SIZE, group_columns=["center"]).group_columns == ("center",)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("center", "hospital", "no column 'center'"),
        ("21792,1,", "21792,3,", "row 1, not '3'"),
        ("004,4", "/../../..,4", "leads out"),
    ],
)
def test_camelyon17_that_was_altered_is_refused(camelyon17: Path, old: str, new: str, words: str) -> None:
    file = camelyon17 / "metadata.csv"
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(InputError, match=words):
        open_dataset(camelyon17, size=SIZE)


# The classifier's labels -----------------------------------------------------------------------------------------


def test_labels_are_those_of_the_classifier_or_named(manifest: Path) -> None:
    dataset = open_dataset(manifest, size=SIZE)
    assert dataset.label_indices(["dark", "blond", "red"]).tolist() == [1, 0, 0, 1]
    with pytest.raises(InputError, match=r"not know 1 of the 2 labels in the data: 'blond'\. It knows: 'dark', 'fair'"):
        dataset.check_labels(["dark", "fair"])
    renamed = open_dataset(manifest, size=SIZE, label_names={"blond": "fair"})
    assert renamed.labels == ("fair", "dark")
    assert renamed.label_indices(["dark", "fair"]).tolist() == [1, 0, 0, 1]
    with pytest.raises(InputError, match="renames 'blonde', but the labels are: 'blond', 'dark'"):
        open_dataset(manifest, size=SIZE, label_names={"blonde": "fair"})


def test_many_unknown_labels_are_counted(tmp_path: Path) -> None:
    rows = "".join(f"{n}.png,{n}\n" for n in range(100))
    dataset = open_dataset(_manifest(tmp_path, "image,label\n" + rows), size=SIZE)
    with pytest.raises(InputError, match="'0', '1', '2', '3', '4' and 95 more"):
        dataset.check_labels(["dark", "blond"])


# Bad pictures ----------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Forty pictures; 3 is missing, 7 is cut short, 11 is text, 13 has a name that no file system takes."""
    noise = np.random.default_rng(0).integers(0, 256, (30, 30, 3), dtype=np.uint8)
    names = [f"{n:02d}.png" for n in range(40)]
    for n, name in enumerate(names):
        if n != 3:
            _png(tmp_path / name, n)
    Image.fromarray(noise).save(tmp_path / "07.png")
    (tmp_path / "07.png").write_bytes((tmp_path / "07.png").read_bytes()[:1000])
    (tmp_path / "11.png").write_text("hello")
    names[13] = "x" * 300 + ".png"
    return _manifest(tmp_path, "image,label\n" + "".join(f"{name},{n % 2}\n" for n, name in enumerate(names)))


def test_bad_pictures_are_named_counted_and_left_out(damaged: Path) -> None:
    dataset = open_dataset(damaged, size=SIZE, max_bad_share=0.1)
    assert dataset.bad_summary == ""
    found = dict(dataset.readable(range(40)))
    assert sorted(found) == [n for n in range(40) if n not in (3, 7, 11, 13)]
    assert all(round(float(image.mean()) * 255) == row for row, image in found.items())
    assert set(dataset.bad) == {"03.png", "07.png", "11.png", "x" * 300 + ".png"}
    assert dataset.bad["03.png"] == "not a file"
    assert dataset.bad_summary.startswith(
        "4 of 40 pictures could not be read: 03.png (not a file), 07.png (cut short or damaged), 11.png (not an image"
    )
    with pytest.raises(ImageError, match=r"03\.png is not a file"):
        dataset.images([2, 3])


def test_more_bad_pictures_than_stated_end_the_reading(damaged: Path) -> None:
    dataset = open_dataset(damaged, size=SIZE, max_bad_share=0.05)
    seen = []
    with pytest.raises(InputError, match=r"3 of the 40 pictures asked for .* allowed 5%: 03\.png \(not a file\), 07"):
        for row, _ in dataset.readable(range(40)):
            seen.append(row)
    assert max(seen) == 10
    strict = open_dataset(damaged, size=SIZE, max_bad_share=0)
    with pytest.raises(InputError, match=r"1 of the 4 .* 0%"):
        list(strict.readable([0, 1, 2, 3]))
    assert [row for row, _ in strict.readable([0, 1, 2])] == [0, 1, 2]


def test_a_picture_that_was_repaired_is_no_longer_bad(damaged: Path) -> None:
    dataset = open_dataset(damaged, size=SIZE, max_bad_share=1)
    assert list(dataset.readable([3])) == []
    _png(damaged.parent / "03.png")
    assert len(list(dataset.readable([3]))) == 1
    assert dataset.bad == {}


def test_pictures_are_read_only_when_asked_for(damaged: Path) -> None:
    dataset = open_dataset(damaged, size=SIZE)
    for file in damaged.parent.glob("*.png"):
        file.unlink()
    assert len(dataset) == 40
    _png(damaged.parent / "05.png", 77)
    assert round(float(dataset.image(5).mean()) * 255) == 77


# Order, identity, parts ------------------------------------------------------------------------------------------


def test_the_seed_decides_the_order(damaged: Path) -> None:
    dataset = open_dataset(damaged, size=SIZE)
    order = dataset.order(3)
    assert sorted(order) == list(range(40))
    assert order == open_dataset(damaged, size=SIZE).order(3)
    assert order != dataset.order(4) != list(range(40))


def test_the_hash_tells_tables_and_files_apart_but_not_places(manifest: Path, tmp_path: Path) -> None:
    before = open_dataset(manifest, size=SIZE).content_hash
    assert len(before) == len(hashlib.sha256().hexdigest())
    moved = tmp_path / "moved"
    moved.mkdir()
    (manifest.parent / "pictures").rename(moved / "pictures")
    manifest = manifest.rename(moved / "other.csv")
    assert open_dataset(manifest, size=SIZE).content_hash == before
    text = manifest.read_text()
    manifest.write_text(text.replace("c.png,dark", "c.png,blond"))
    assert open_dataset(manifest, size=SIZE).content_hash != before
    manifest.write_text(text)
    with (moved / "pictures" / "c.png").open("ab") as file:
        file.write(b"x")
    assert open_dataset(manifest, size=SIZE).content_hash != before
    (moved / "pictures" / "c.png").unlink()
    assert open_dataset(manifest, size=SIZE).content_hash != before


def test_a_subset_has_its_own_rows_labels_and_bad_files(damaged: Path) -> None:
    dataset = open_dataset(damaged, size=SIZE, max_bad_share=1)
    part = dataset.subset([5, 3, 1])
    assert part.table["image"].tolist() == ["05.png", "03.png", "01.png"]
    assert part.labels == ("1",)
    assert [row for row, _ in part.readable(range(3))] == [0, 2]
    assert part.bad_summary == "1 of 3 pictures could not be read: 03.png (not a file)"
    assert dataset.bad == {}
    assert part.content_hash != dataset.content_hash


def test_pictures_in_memory_are_a_data_set() -> None:
    images = torch.rand(4, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    dataset = dataset_of_images(images, ["dark", "blond", "dark", "blond"], {"beard": [0, 1, 1, 0]})
    assert torch.equal(dataset.images([2, 0]), images[[2, 0]])
    assert (dataset.labels, dataset.group_columns, dataset.size) == (("blond", "dark"), ("beard",), SIZE)
    other = images.clone()
    other[3, 0, 0, 0] += 0.5
    assert (
        dataset.content_hash
        != dataset_of_images(other, list(dataset.table["label"]), {"beard": [0, 1, 1, 0]}).content_hash
    )
    with pytest.raises(InputError, match="N labels"):
        dataset_of_images(images, ["dark"])


@pytest.mark.parametrize(("setting", "words"), [({"size": 0}, "at least 1 pixel"), ({"max_bad_share": 2}, "between 0")])
def test_settings_out_of_range_are_refused(manifest: Path, setting: dict[str, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        open_dataset(manifest, **{"size": SIZE, **setting})  # type: ignore[arg-type]
