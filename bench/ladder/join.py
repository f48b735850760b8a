"""Room bench: ladders of one setting, from several cards, hosts or visits, put together into one."""

import shutil
from dataclasses import replace
from pathlib import Path

from bench.ladder.begun import read_begun, rungs_then
from bench.ladder.climb import new_ladder
from bench.ladder.journal import FILE, RUNS, Journal, read_boots
from bench.ladder.resume import as_measured
from bench.ladder.sequence import outlook
from bench.ladder.setting import Setting, read_setting
from bench.ladder.table import write_table
from bench.runfolder import seal_faults
from images.errors import Problem, RunProblem, UsageProblem
from recipes.load import families, load_ladder


def join_ladders(folders: list[Path], root: Path) -> tuple[Path, dict]:
    """Copy the runs of several ladders into a new one below `root`, and make its table; the sources stay as they are.

    Each boot stays with its visit, so that steps are taken within visits only. Raises UsageProblem for fewer than
    two, RunProblem where they were asked for different things (load, windows, order), or a run is in two of them.
    """
    if len(folders) < 2:
        raise UsageProblem("--join: give it once for each ladder, two at least")
    settings = [read_setting(folder) for folder in folders]
    setting = _common(settings, folders)
    begun = [read_begun(folder, setting) for folder in folders]
    rungs = {name: rung for each in reversed(begun) for name, rung in each.items()}
    made = new_ladder(root, setting, [rungs[name] for name in setting.rungs if name in rungs])
    journal = Journal(made)
    try:
        for folder in folders:
            for boot in read_boots(folder):
                if boot.state not in {"finished", "failed"}:
                    continue
                source = folder / RUNS / boot.run if boot.run else None
                if source and source.is_dir() and not source.is_symlink() and not seal_faults(source):
                    shutil.copytree(source, made / RUNS / source.name)
                journal.ended(boot)
        return made, remake(made)
    except FileExistsError as error:
        shutil.rmtree(made)
        raise RunProblem(f"{Path(error.filename).name} is in two of these ladders: each boot may count once") from error
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def remake(folder: Path) -> dict:
    """Make a ladder's table again from its folder alone, on any machine; returns it, written.

    A ladder of before recipes.json takes from today's library what its runs don't tell.

    Raises RunProblem where the folder is no ladder's, or has no run yet.
    """
    setting = read_setting(folder)
    try:
        return _remade(folder, setting)
    except Problem:
        raise
    except Exception as error:  # whatever a stranger's folder holds is one clear error
        raise RunProblem(f"{folder}: can't be read as a ladder: {type(error).__name__}: {error}"[:500]) from error


def _remade(folder: Path, setting: Setting) -> dict:
    runs = sorted((folder / RUNS).glob("*/machine.json"))
    if not runs:
        raise RunProblem(f"{folder}: no boot of this ladder has been recorded yet ({FILE})")
    boots = read_boots(folder)
    rungs = rungs_then(folder, setting, boots)
    if not setting.keep:
        rungs = as_measured(folder, rungs, boots)
    return write_table(folder, setting, rungs, boots, outlook(setting, rungs, folder, boots))


def _common(settings: list[Setting], folders: list[Path]) -> Setting:
    """One setting for all: the same load and order, every rung of any in the ladder's order.

    The boots asked for are the most that any asked for: what was cut off is no whole result by being joined.
    """
    first = settings[0]
    for other, folder in zip(settings[1:], folders[1:], strict=True):
        if replace(other, rungs=first.rungs, boots=first.boots, begun_with=first.begun_with) != first:
            raise RunProblem(f"{folder} is another ladder than {folders[0]}: family, load, windows or order differ")
    named = [name for setting in settings for name in setting.rungs]
    order = [*(load_ladder(first.family).rungs if first.family in families() else ()), *named]
    rungs = sorted(dict.fromkeys(named), key=order.index)
    begun_with = next((setting.begun_with for setting in settings if setting.begun_with), None)
    boots = max(setting.boots for setting in settings)
    return replace(first, rungs=rungs, boots=boots, begun_with=begun_with)
