"""Reports of a comparison of policies: a table, a summary of one sentence, and an HTML page with figures."""

from kvevents.sim.report.page import page
from kvevents.sim.report.rendering import check_matplotlib
from kvevents.sim.report.settings import report_settings, traffic_text
from kvevents.sim.report.table import Cell, rows
from kvevents.sim.report.words import summary

__all__ = ["Cell", "check_matplotlib", "page", "report_settings", "rows", "summary", "traffic_text"]
