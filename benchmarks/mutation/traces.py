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
        "yield category, going_on & waited if len(waited) else going_on",
        "yield category, going_on",
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
        "for each in rank.total.categories if each not in MESSAGES)",
        "for each in rank.total.categories)",
        "trace/analysis/test_report.py",
        "a rank that waits for another counts as busy",
    ),
    Mutant(
        "trace/analysis/stragglers.py",
        "(_start_up(rank).get(category, 0.0) if is_first else 0.0)",
        "0.0",
        "trace/analysis/test_report.py",
        "a loader that starts later makes a straggler",
    ),
    Mutant(
        "trace/analysis/loop.py",
        "        base = of_loop if self._makes_epochs.any() else is_numbered\n",
        "        base = is_numbered\n",
        "trace/analysis/test_loop.py",
        "what readers do for the next epoch is an epoch",
    ),
    Mutant(
        "trace/analysis/attribution.py",
        "    by_loop = rank.on_loop & rank.lies_in(waited)\n    for",
        "    by_loop = rank.on_loop & ~rank.on_loop\n    for",
        "trace/analysis/test_attribution.py",
        "what makes batches in the loop itself is not what it waits for",
    ),
    Mutant(
        "trace/analysis/replay.py",
        "    shortened[_firsts(steps)] = 0.0\n",
        "",
        "trace/analysis/test_report.py",
        "more readers shorten what comes before the first batch",
    ),
]
