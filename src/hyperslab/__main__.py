"""``python -m hyperslab``: the ``hyperslab`` command, where its script is not on the PATH."""

from hyperslab.cli.main import main

main(prog_name="hyperslab")
