"""The door verl opens: importing this module makes strategy `prefixflow` available.

verl imports it through the entry point group `verl.plugins` (and then calls nothing), or through
`VERL_USE_EXTERNAL_MODULES=prefixflow_verl.register`. The first way swallows exceptions at DEBUG
level, so whatever goes wrong is logged as an error before it is raised.

Importing it changes nothing in a run that does not name the strategy, apart from the general
repairs of `compat.LEDGER`.
"""

from __future__ import annotations

import importlib
import logging

from prefixflow_verl import compat

logger = logging.getLogger(__name__)


def register() -> None:
    """Checks the host, registers the CPU platform where it was asked for, schedules the patches.

    Repeating it changes nothing.

    Raises:
        UnsupportedHostError: the installed verl is not a supported release.
    """
    try:
        compat.check_verl_version()
    except compat.UnsupportedHostError as error:
        logger.error("strategy prefixflow is not available: %s", error)
        raise
    on_cpu = compat.is_cpu_selected()
    if on_cpu:
        importlib.import_module("prefixflow_verl.platform_cpu")
    compat.apply_ledger(on_cpu=on_cpu)


register()
