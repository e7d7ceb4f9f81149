"""Importing this makes every later import of a compiled extension resolve its symbols when they are called, not before.

LMCache 0.5.4 to 0.5.6 is built for torch 2.13. On torch 2.11 its extension lacks one symbol, which nothing calls here;
looked for at once, it keeps the extension from loading, and LMCache goes on with slow torch code and only a warning.
"""

import os
import sys

sys.setdlopenflags(os.RTLD_LAZY)
