"""PyInstaller's hook: libraries, data, and modules that are imported by name.

What draws plots and fits profiles is left out, unless the program itself imports these packages.
"""

from PyInstaller.utils.hooks import (
    collect_data_files,
    collect_dynamic_libs,
    collect_submodules,
    copy_metadata,
)

binaries = collect_dynamic_libs("edgekv")
datas = collect_data_files("edgekv") + copy_metadata("edgekv")
hiddenimports = collect_submodules("edgekv", filter=lambda name: ".bundling" not in name)
excludedimports = ["cma", "matplotlib", "scipy"]
