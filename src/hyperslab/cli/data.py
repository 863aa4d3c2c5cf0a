"""``hyperslab data``: look at samples in files, rewrite them, copy them, make them up."""

import click

from hyperslab.cli.main import LazyGroup

COMMANDS = {
    "info": "hyperslab.cli.data_info",
    "index": "hyperslab.cli.data_index",
    "stats": "hyperslab.cli.data_index",
    "repack": "hyperslab.cli.data_copy",
    "stage": "hyperslab.cli.data_copy",
    "synth": "hyperslab.cli.data_synth",
}

EXAMPLES = """\b
Examples:
  hyperslab data info cosmo/*.h5 --preset cosmoflow --mesh depth=4
  hyperslab data index cosmo -o cosmo.json --preset cosmoflow
  hyperslab data stats cosmo.json
  hyperslab data repack cosmo/*.h5 packed --preset cosmoflow --mesh depth=4
  hyperslab data stage packed/*.h5 /local/cosmo --preset cosmoflow
"""


@click.group(cls=LazyGroup, modules=COMMANDS, epilog=EXAMPLES)
def data() -> None:
    """Look at samples in files, index, measure, rewrite, copy them, or make them up.

    A sample is one array of a file, such as an image of 4x512x512x512, and the targets that belong
    to it; formats are HDF5, NPY, raw binary, Zarr, NIfTI and TFRecord.
    """
