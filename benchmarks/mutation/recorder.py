"""Mutants of what records traces."""

from mutation.mutant import Mutant

MUTANTS = [
    Mutant(
        "trace/recorder.py",
        "            return min(max(int(value), least), most)\n",
        "            return int(value)\n",
        "trace/test_recorder.py",
        "a large number in a span stops the program",
    ),
    Mutant(
        "trace/recorder.py",
        "        seconds = FIRST_DRAIN_SECONDS\n",
        "        seconds = DRAIN_SECONDS\n",
        "trace/test_recorder.py",
        "processes that are killed soon lose all",
    ),
    Mutant(
        "trace/recorder.py",
        "            self._tell_news(file)\n            for lane, stop in full:\n",
        "            for lane, stop in full:\n",
        "trace/test_recorder.py",
        "spans come to the file before the names that they have",
    ),
    Mutant(
        "trace/recorder.py",
        "        if not self._has_ended:\n            self.flush()\n        lane.at",
        "        lane.at",
        "trace/test_recorder.py",
        "a thread that records fast loses what it holds",
    ),
    Mutant(
        "trace/active.py",
        "        parent.abandon()\n        recorder = Recorder(",
        "        recorder = None\n        Recorder(",
        "trace/test_recorder.py",
        "forked processes are not recorded",
    ),
    Mutant(
        "trace/clocks.py",
        "int(received[0]) - middle",
        "middle - int(received[0])",
        "trace/test_clocks.py",
        "clocks are moved the wrong way",
    ),
    Mutant(
        "store/pipeline.py",
        "if was_ready and since and",
        "if since and",
        "trace/test_path.py",
        "a batch that the loop waited for waited for the loop",
    ),
    Mutant(
        "comm/device_spans.py",
        "if found < mark.asked:",
        "if found < 0:",
        "comm/test_device_spans.py",
        "a GPU that was busy when its clock was read is put too early for ever",
    ),
]
