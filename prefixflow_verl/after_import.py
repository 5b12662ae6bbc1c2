"""Runs a function once a named module has been imported, now or later.

Patching a host module when it is imported, not before, keeps `import verl` as fast and as free of
side effects as it is without the plugin: verl's engine package alone pulls in every training
backend that is installed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence

ModuleAction = Callable[[types.ModuleType], None]


def after_import(module_name: str, action: ModuleAction) -> None:
    """Calls `action(module)` at once if the module is loaded, else right after it is executed.

    An exception from `action` surfaces where the module is imported.
    """
    module = sys.modules.get(module_name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        action(module)
        return
    _finder().actions.setdefault(module_name, []).append(action)


class _AfterImportFinder(importlib.abc.MetaPathFinder):
    """Finds modules as the default path finder does and hooks the execution of awaited ones."""

    def __init__(self) -> None:
        self.actions: dict[str, list[ModuleAction]] = {}

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.actions:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        actions = self.actions.pop(fullname)
        execute = spec.loader.exec_module

        def execute_then_act(module: types.ModuleType) -> None:
            execute(module)
            for action in actions:
                action(module)

        spec.loader.exec_module = execute_then_act
        return spec


def _finder() -> _AfterImportFinder:
    for finder in sys.meta_path:
        if isinstance(finder, _AfterImportFinder):
            return finder
    finder = _AfterImportFinder()
    sys.meta_path.insert(0, finder)
    return finder
