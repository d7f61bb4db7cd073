"""What the programs of chaos share: engines, their truth, stages with processes, judging, reports and command lines."""
