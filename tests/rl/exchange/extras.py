"""Must the extra `worlds` be there? Without it its tests are skipped, unless TERRELLA_REQUIRE names it. Helper
module, not a test.
"""

import os

REQUIRED = "worlds" in os.environ.get("TERRELLA_REQUIRE", "").split(",")
