"""Room images: the front door: Invoke's program with the project's exit codes and one way to end."""

import inspect
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from copy import copy
from pathlib import Path

from invoke import Collection, Config, Exit, Program
from invoke.exceptions import ParseError
from invoke.parser import Argument

from images.errors import Problem, nearest

# Invoke's own options that do something here. The others are about its way to run a command, which no task uses:
# of `--dry` a user would expect that nothing is changed.
KEPT = {"complete", "debug", "help", "list", "list-depth", "list-format", "print-completion-script", "version"}
KEPT |= {"write-pyc"}


class NobodysConfig(Config):
    """Invoke's configuration under a name of our own: a user's ~/.invoke.py is theirs, not ours to run."""

    prefix = "station-recipes-invoke"


class FrontDoor(Program):
    """Invoke's program with the project's exit codes: wrong usage is 2, a problem is one message."""

    def __init__(self, *, namespace: Collection, **told):
        super().__init__(namespace=namespace, **told)
        for name in namespace.task_names:  # Invoke's letters would mean another option from task to task
            namespace[name].auto_shortflags = False

    def core_args(self):
        """Invoke's own options, those of KEPT."""
        return [option for option in super().core_args() if option.name in KEPT]

    def update_config(self, merge=True):
        """Take no setting from the command line or the environment: there is no option for one."""
        if merge:
            self.config.merge()

    def parse_core(self, argv):
        """Parse; a mistake ends with status 2 and the nearest task's name."""
        program, *given = argv
        self._refuse_short_host(given)
        self._refuse_empty_lists(given)
        self._as_usage(super().parse_core, [program, *_arguments(given, self.namespace.task_names)])

    def parse_tasks(self):
        """Parse; a mistake ends with status 2 and the nearest task's name."""
        self._as_usage(super().parse_tasks)
        for option in (option for task in self.tasks for option in task.args.values()):
            self._refuse_nothing(option)
            if option.positional and re.match("-.", str(option.value)):  # Invoke takes an option it doesn't know for it
                raise Exit(self._complaint(f"No idea what '{option.value}' is", self.argv[1:]), code=2)

    def _refuse_nothing(self, option: Argument) -> None:
        """An empty value, such as of an unset variable, is no wish for the default; nor is 0 where 0 stands for it."""
        if any(str(value).strip() == "" for value in _given(option)):
            name = option.name.upper() if option.positional else _spelt(option.name)
            way_out = "" if option.positional else ", or leave it out"
            raise Exit(f"{name} is empty; was a shell's variable not set? Give it a value{way_out}.", code=2)
        if option.kind is int and option.default == 0 and _given(option) == [0]:
            raise Exit(f"{_spelt(option.name)} wants 1 or more, not 0; leave it out for the default.", code=2)

    def parse_cleanup(self):
        """Answer --help and --list."""
        try:
            try:
                super().parse_cleanup()
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            raise _unread() from None

    def _refuse_short_host(self, given: list[str]) -> None:
        """-h is --help: with a value behind it, for a task that takes --host, somebody meant that."""
        if not given or given[0] not in self.namespace.task_names or "--help" in given:
            return
        if "host" not in inspect.signature(self.namespace[given[0]].body).parameters:
            return
        for place, word in enumerate(given):
            behind = given[place + 1] if word == "-h" and place + 1 < len(given) else word[2:].removeprefix("=")
            if word.startswith("-h") and behind and not behind.startswith("-"):
                meant = f"./inv {given[0]} --host {behind}"
                raise Exit(f"-h is --help, and takes no value: a host is named with --host, {meant}", code=2)

    def _options(self, given: list[str]) -> dict[str, Argument]:
        """By how it is written, such as --port, each option of the task that the command line begins with."""
        if not given or given[0] not in self.namespace.task_names:
            return {}
        task = copy(self.namespace[given[0]])
        task.help = dict(task.help)  # asking for a task's arguments takes its help away
        return {_spelt(name): option for option in task.get_arguments() for name in option.names}

    def _refuse_empty_lists(self, given: list[str]) -> None:
        """An option that may be repeated and has no value: Invoke would take it for one that isn't there."""
        repeated = {name for name, option in self._options(given).items() if option.kind is list}
        for word, behind in _with_next(given, "--"):
            if word in repeated and behind.startswith("-") and behind != "-":
                raise Exit(f"{word} needs a value. `./inv {given[0]} --help` says which.", code=2)

    def _as_usage(self, parse, *args):
        given = self.argv[1:]
        try:
            parse(*args)
        except ParseError as error:
            raise Exit(self._complaint(str(error), given), code=2) from None
        except ValueError as error:  # Invoke's int() of an option's value
            raise Exit(self._no_number(given) or f"an option wants a number: {error}", code=2) from None

    def _complaint(self, message: str, given: list[str]) -> str:
        """A parser's complaint in our words, with what was likely meant and where to look."""
        options = self._options(given)
        unknown = re.match(r"No idea what '(.*)' is", message)
        if not unknown:
            return f"{_in_our_words(message)}. `./inv {given[0] if options else 'TASK'} --help` explains a task."
        word = unknown[1]
        before = given[given.index(word) - 1] if options and word in given else ""
        flags = {*options, *(f"--no-{name.lstrip('-')}" for name in options), *self.initial_context.flags}
        if re.match("-.", before) and "=" not in before and before not in flags:
            word = before  # the word behind it is its value, very likely
        said, known, where = f"there is no task {word!r}", list(self.namespace.task_names), "--list"
        if word.startswith("-"):
            about = f"{given[0]} " if options else ""
            said, known, where = f"{about or './inv '}has no option {word}", list(options), f"{about}--help"
        elif options and word != given[0]:
            said = f"{given[0]} takes no {word!r}, and there is no task of that name"
        close = nearest(word, known, count=1)
        return f"{said}.{f' Did you mean: {close[0]}?' if close else ''} `./inv {where}` lists them."

    def _no_number(self, given: list[str]) -> str | None:
        """Which option has no number where it wants one."""
        options = self._options(given)
        for word, behind in _with_next(given, ""):
            name, equals, value = word.partition("=")
            value = value if equals else behind
            if name in options and options[name].kind is int and not re.fullmatch(r"[+-]?\d+", value):
                return f"{name} wants a whole number, not {value!r}"
        return None

    def execute(self):
        """Run the tasks; a Problem is printed as one message."""
        try:
            super().execute()
        except Problem as problem:
            raise Exit(f"✘ {problem}", code=problem.exit_code) from None
        except KeyboardInterrupt:
            raise Exit("interrupted", code=1) from None
        except BrokenPipeError:
            raise _unread() from None
        except OSError as error:  # a full disk, a folder that is read-only: nothing that a traceback would explain
            where = f"{error.filename}: " if error.filename else ""
            raise Exit(f"✘ {where}{error.strerror or error}", code=1) from None


def _spelt(name: str) -> str:
    """An option's name as it is written: --port, or -k."""
    return f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"


def _given(option: Argument) -> list:
    """The values that a command line gives an option; empty where it doesn't name it."""
    if option.kind is list:
        return option.value
    return [] if option.raw_value is None else [option.value]


def _with_next(words: list[str], last: str) -> Iterator[tuple[str, str]]:
    """Yield each word with the one behind it; `last` stands behind the last."""
    return zip(words, [*words[1:], last][: len(words)], strict=True)


def _in_our_words(message: str) -> str:
    """A parser's complaint as a sentence: Invoke names its own objects, and shouts."""
    needs = re.fullmatch(r"Flag <Argument: (\S+).*> needed value and was not given one!", message)
    return f"--{needs[1].replace('_', '-')} needs a value" if needs else message.rstrip("!")


def _arguments(argv: list[str], names: Iterable[str]) -> list[str]:
    """Put a task's --help before its name: after it, a positional argument would swallow it."""
    asked = argv and argv[0] in names and {"--help", "-h"} & set(argv)
    return ["--help", argv[0]] if asked else argv


def _unread() -> Exit:
    """How we end when whoever read our output has had enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Exit(code=141)


def _terminated(*_: object) -> None:
    raise KeyboardInterrupt


def open_door(tasks: Collection) -> None:
    """Run the tasks that the command line names, and exit."""
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 it stays open as long as we live
    # Said for SIGINT too: a shell that starts us in the background has it ignored, and then we'd never clean up.
    endings = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # who says nohup wants us to outlive the terminal
        endings.append(signal.SIGHUP)
    for ending in endings:
        signal.signal(ending, _terminated)
    door = FrontDoor(
        name="station-recipes", binary="./inv", namespace=tasks, version="0.1.0", config_class=NobodysConfig
    )
    door.run(["./inv", *sys.argv[1:]])
