"""Common code of the chaos programs: engines, their truth, stages with processes, judging, reports and command lines."""
