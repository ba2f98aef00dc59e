"""Pages: one file that needs nothing else, with everything from elsewhere escaped."""

import base64
import io
import re

from PIL import Image

from topk_registry.pages import (
    Picture,
    bars,
    gallery,
    heading,
    intervals,
    lines,
    listing,
    page,
    paragraph,
    table,
    thumbnail,
    write_page,
)

HOSTILE = '<script>alert("&")</script>'


def test_a_page_is_one_file_that_fetches_nothing(tmp_path):
    shown = [
        table((HOSTILE,), [(HOSTILE,), (0.123456,), ((1.0, 2.0),)]),
        paragraph(HOSTILE) + heading(HOSTILE) + listing([HOSTILE]),
        bars([(HOSTILE, 1.0)], label=HOSTILE, of=HOSTILE),
        lines({HOSTILE: [(0.0, 1.0), (1.0, 2.0)]}, label=HOSTILE, of=HOSTILE),
        intervals([(HOSTILE, -1.0, 0.5, 1.0)], label=HOSTILE, of=HOSTILE, band=(-0.5, 0.5)),
        gallery([Picture(thumbnail(Image.new("L", (400, 200))), HOSTILE, HOSTILE), Picture("", HOSTILE)]),
    ]
    text = page(HOSTILE, HOSTILE, [(HOSTILE, content) for content in shown])
    write_page(tmp_path / "new" / "page.html", text)
    assert (tmp_path / "new" / "page.html").read_text(encoding="utf-8") == text
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]
    assert "<script" not in text
    assert "http:" not in text
    assert "https:" not in text
    assert "default-src 'none'" in text
    assert text.count("<svg") == 3
    assert "0.1235" in text
    assert "1 to 2" in text


def test_thumbnails_fit_and_small_images_grow_by_whole_pixels():
    def size(uri):
        return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).size

    assert size(thumbnail(Image.new("RGBA", (640, 480)))) == (96, 72)
    assert size(thumbnail(Image.new("L", (32, 16)))) == (96, 48)
    assert size(thumbnail(Image.new("RGB", (60, 60)))) == (60, 60)


def test_intervals_stand_where_their_numbers_are():
    svg = intervals([("a", -1.0, 0.0, 1.0)], label="differences", of="points")
    (circle,) = re.findall(r'<circle cx="([\d.]+)"', svg)
    (zero,) = re.findall(r'<path d="M([\d.]+) 16V', svg)
    assert circle == zero
    assert "a: 0 (-1 to 1)" in svg
