"""``python -m timm_moe`` is the command ``timm-moe``."""

import sys

from timm_moe_cli import main

sys.exit(main())
