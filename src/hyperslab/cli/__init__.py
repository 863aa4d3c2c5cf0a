"""The ``hyperslab`` command: one file a subcommand, which loads torch only when it runs."""
