"""Reports of a comparison of policies: a table, a summary of one sentence, and an HTML page with figures."""

from kvevents.sim.report.figures import check_matplotlib
from kvevents.sim.report.page import page
from kvevents.sim.report.text import Cell, report_settings, rows, summary, traffic_text

__all__ = ["Cell", "check_matplotlib", "page", "report_settings", "rows", "summary", "traffic_text"]
