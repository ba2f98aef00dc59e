"""Pages of findings: one self-contained HTML file with headings, tables, plots and pictures, light and dark.

A page needs no network, no script and no other file. Text that comes from elsewhere is escaped.
"""

from topk_registry.pages.page import cell, heading, listing, page, paragraph, table, write_page
from topk_registry.pages.pictures import Picture, gallery, thumbnail
from topk_registry.pages.plots import bars, intervals, lines

__all__ = [
    "Picture",
    "bars",
    "cell",
    "gallery",
    "heading",
    "intervals",
    "lines",
    "listing",
    "page",
    "paragraph",
    "table",
    "thumbnail",
    "write_page",
]
