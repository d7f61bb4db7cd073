"""What a comparison of policies came to: as a table, as one sentence, and as a page with figures."""

from kvevents.sim.report.page import page
from kvevents.sim.report.rendering import check_drawing
from kvevents.sim.report.settings import asked, described
from kvevents.sim.report.table import Cell, rows
from kvevents.sim.report.words import seen

__all__ = ["Cell", "asked", "check_drawing", "described", "page", "rows", "seen"]
