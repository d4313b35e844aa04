from typing import Any

class MoESubmodules:
    router: Any
