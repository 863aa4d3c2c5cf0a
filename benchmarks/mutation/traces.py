"""Mutants of trace."""

from mutation.mutant import Mutant

MUTANTS = [
    Mutant(
        "trace/analysis/bandwidth.py",
        "are_told = 1 < len(ranks) <= MOST_RANKS",
        "are_told = len(ranks) <= MOST_RANKS",
        "trace/analysis/test_report.py",
        "one rank has its bandwidth twice",
    ),
    Mutant(
        "trace/analysis/tables.py",
        "if Measurement.get(console, unlimited, table).maximum <= options.max_width:",
        "if Measurement.get(console, unlimited, table):",
        "trace/analysis/test_tables.py",
        "tables are wider than the screen",
    ),
    Mutant(
        "trace/analysis/intervals.py",
        "latest = np.maximum.accumulate(stops)",
        "latest = stops",
        "trace/analysis/test_intervals.py",
        "an interval within another one ends it",
    ),
    Mutant(
        "trace/analysis/attribution.py",
        "left = left - given",
        "left = left - Intervals()",
        "trace/analysis/test_attribution.py",
        "a moment is given to all who claim it",
    ),
    Mutant(
        "trace/analysis/attribution.py",
        "explained = going_on & waited if len(waited) else going_on",
        "explained = going_on",
        "trace/analysis/test_attribution.py",
        "readers count as waited for while the loop does not wait",
    ),
    Mutant(
        "trace/analysis/attribution.py",
        "    return passes - Intervals.of(rank.starts[waits], rank.stops[waits])\n",
        "    return passes\n",
        "trace/analysis/test_attribution.py",
        "waiting within a pass counts as computing",
    ),
    Mutant(
        "trace/analysis/loop.py",
        "            told.setdefault(number, window - known)\n",
        "            told.setdefault(number, window)\n",
        "trace/analysis/test_loop.py",
        "an epoch that was killed begins within the one before",
    ),
    Mutant(
        "trace/analysis/replay.py",
        "axis=1) + np.min(messages, axis=1)).sum())",
        "axis=1) + np.max(messages, axis=1)).sum())",
        "trace/analysis/test_report.py",
        "waiting for the slowest rank counts as the network's",
    ),
    Mutant(
        "trace/analysis/stragglers.py",
        "    return period.seconds - period.exposed(*MESSAGES) if period else 0.0\n",
        "    return period.seconds if period else 0.0\n",
        "trace/analysis/test_report.py",
        "a rank that waits for another counts as busy",
    ),
]
