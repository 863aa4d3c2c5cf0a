"""How a run is asked to stop, and how it answers."""

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGHUP")
"""What users, launchers and batch systems send before they kill (``sbatch --signal=USR1@60``)."""

CAN_GO_ON = 75
"""The exit code of a run that a signal stopped and that can go on (EX_TEMPFAIL)."""
