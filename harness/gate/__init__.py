"""What got worse: a run against a baseline, and one revision against another."""
