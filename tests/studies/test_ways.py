"""Pages that compare ways: their table, and sentences on who is ahead."""

import pytest

from topk_studies.report import ways


def test_sentences_say_who_is_ahead():
    evidence = "macro top-5 of {} less cross-entropy: {} ± 1.00 points (5 seeds)"
    notes = [
        {"verdict": verdict, "evidence": evidence.format(name, gap)}
        for name, verdict, gap in (("a", "agrees", "+3.00"), ("b", "differs", "-2.00"), ("c", "agrees", "+1.50"))
    ]
    said = ways.sentences({"notes": notes})
    ahead = "ahead: a (+3.00 ± 1.00), c (+1.50 ± 1.00)"
    assert said == f"- In macro top-5, against cross-entropy: {ahead}; behind: b (-2.00 ± 1.00).\n"
    rows = [["a", {"mean": 61.24, "half_width": 0.96, "count": 5}, None]]
    summary = {"notes": notes, "tables": [{"columns": ["", "macro top-5", "top-1"], "rows": rows}]}
    text = "<!-- ways -->\nold\n<!-- /ways -->\n<!-- ahead -->\n<!-- /ahead -->\n"
    written = ways.update(text, summary)
    assert "| way | macro top-5 | top-1 |\n| --- | --- | --- |\n| a | 61.2 ± 1.0 |  |\n<!-- /ways -->" in written
    assert f"<!-- ahead -->\n{said}<!-- /ahead -->" in written
    with pytest.raises(ValueError, match="expected a difference of two ways, got 'nothing'"):
        ways.sentences({"notes": [{"verdict": "open", "evidence": "nothing"}]})
