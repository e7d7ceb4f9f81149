from any_package import anything as __getattr__  # noqa: F401
from any_package import find_submodules

__version__ = "0.0.0"
find_submodules(__name__)
