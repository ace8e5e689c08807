"""Pages hold text of strangers as text, and tell a story in its order."""

from html.parser import HTMLParser

import pytest

from audit.pages import WORDS, Chapter, curve, escape, kind_of, printable, story


class Tags(HTMLParser):
    """Collects the elements of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    return tags


@pytest.mark.parametrize("evil", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "]]>\x00\x07\x1b[31m"])
def test_a_story_of_strangers_is_text(evil: str) -> None:
    page = story(evil, evil, [Chapter(evil, evil, "FAIL", (evil,), evil, ((evil, evil),))])
    tags = parsed(page)
    assert [tag for tag, _ in tags.found if tag == "script"] == []
    assert len([tag for tag, _ in tags.found if tag == "img"]) == 2
    assert all("onerror" not in attributes for _, attributes in tags.found)
    assert not {"\x00", "\x07", "\x1b"} & set(page)
    assert printable(evil) in tags.text


def test_a_story_has_one_section_per_chapter_and_links_to_their_pages() -> None:
    chapters = [
        Chapter("first", "It cheats.", "FAIL", ("twice",), "a/report.html", (("a/x.png", "a/y.png"),)),
        Chapter("second", "It learns."),
    ]
    tags = parsed(story("title", "opening", chapters))
    assert [a["class"] for tag, a in tags.found if tag == "section"] == ["banner FAIL", "banner "]
    assert [a["href"] for tag, a in tags.found if tag == "a"] == ["a/report.html"]
    assert [a["src"] for tag, a in tags.found if tag == "img"] == ["a/x.png", "a/y.png"]
    assert tags.text.index("1. first") < tags.text.index("2. second")


def test_what_cannot_be_shown_is_replaced_and_the_rest_is_left_alone() -> None:
    assert printable("dark → blond\n\ttab ö 頭") == "dark → blond\n\ttab ö 頭"
    assert printable("a\x00b\x9fc\u202ed\ud800e") == "a\ufffdb\ufffdc\ufffdd\ufffde"
    assert escape("<a href='x'>&\"") == "&lt;a href=&#x27;x&#x27;&gt;&amp;&quot;"


def test_the_first_counterfactual_is_shown_by_its_judgement_and_later_ones_apart() -> None:
    kinds = [kind_of(True, "false", 0), kind_of(False, "None", 0), kind_of(True, "false", 1), kind_of(False, "None", 2)]
    assert kinds == ["false", "invalid", "later", "later"]
    assert set(kinds) <= WORDS.keys()


def test_a_curve_without_observations_is_nothing() -> None:
    assert curve([], 0.2) == ""
    assert "limit 20%" in curve([(1, 0.0, 0.0, 0.9)], 0.2)
