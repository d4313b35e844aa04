class ModuleSpec:
    module: type
    submodules: object
    def __init__(self, module: type, *, submodules: object = None) -> None: ...
