"""Every error that hyperslab raises on purpose."""


class HyperslabError(Exception):
    """The root of all errors raised on purpose; catch it to catch them all."""


class LayoutError(HyperslabError, ValueError):
    """A shape, a cut or a mesh that does not fit the tensor it is meant for."""


class ConfigError(HyperslabError, ValueError):
    """A setting or an argument that cannot be used as given."""


class FormatError(HyperslabError, ValueError):
    """A file that is missing, damaged, or not what it was opened as."""


class CommError(HyperslabError, RuntimeError):
    """Ranks that disagree, or a rank that can no longer be reached."""


class UnsupportedOp(HyperslabError, NotImplementedError):  # noqa: N818 - a public name
    """A torch function that has no exact rule for a split tensor."""
