"""``python -m tools.host_matrix``: make environments, check contracts, run suites, record rows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deft_backend.hosts.windows import TESTED
from tools.host_matrix.contracts import run_contract
from tools.host_matrix.environment import ROOT, NoEnvironmentError, create, python_of, remove
from tools.host_matrix.releases import HOSTS, WheelError, resolve, versions_in_window
from tools.host_matrix.rows import RECORD, put, row_of, version_of
from tools.host_matrix.suite import PROCESSES, SUITES, run_suite


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 0 if every suite passed, 1 if one failed, 2 if there was no environment for one."""
    arguments = _parser().parse_args(words)
    try:
        code: int = arguments.run(arguments)
    except (NoEnvironmentError, WheelError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.host_matrix", description=__doc__)
    commands = parser.add_subparsers(required=True)

    make = commands.add_parser("environment", help="Install a version of a host into a folder.")
    make.add_argument("--host", choices=HOSTS, required=True)
    make.add_argument("--version", default="newest", help="newest, oldest, or a number.")
    make.add_argument("--into", type=Path, required=True)
    make.set_defaults(run=_environment)

    suite = commands.add_parser("suite", help="Run a suite in an environment; record nothing.")
    suite.add_argument("--suite", choices=SUITES, default="common")
    suite.add_argument("--environment", type=Path, required=True)
    suite.set_defaults(run=_suite)

    run = commands.add_parser("run", help="Environment, suite and row, version after version.")
    run.add_argument("--host", choices=HOSTS, help="One host only.")
    run.add_argument("--version", help="One version only; otherwise the whole window.")
    run.add_argument("--suite", choices=("smoke", "full"), default="smoke")
    run.add_argument("--environment", type=Path, help="Run in this one; it is kept.")
    run.add_argument("--keep", action="store_true", help="Keep the environments.")
    run.set_defaults(run=_run)
    for command in (suite, run):
        command.add_argument(
            "--processes", type=int, default=PROCESSES, help="Groups of tests side by side."
        )
    return parser


def _environment(arguments: argparse.Namespace) -> int:
    version = resolve(arguments.host, arguments.version)
    print(f"Installing {arguments.host} {version} into {arguments.into}", flush=True)
    create(arguments.host, version, arguments.into)
    return 0


def _suite(arguments: argparse.Namespace) -> int:
    environment = arguments.environment.absolute()
    outcome = run_suite(arguments.suite, environment, processes=arguments.processes)
    return int(outcome.exit_code != 0)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.host is None and (arguments.version or arguments.environment):
        raise NoEnvironmentError("--version and --environment need --host sglang or --host vllm")
    if arguments.environment is not None:
        return _record(
            arguments.host, arguments.suite, arguments.environment.absolute(), arguments.processes
        )
    codes = []
    for host in [arguments.host] if arguments.host else HOSTS:
        given = arguments.version
        for version in [resolve(host, given)] if given else versions_in_window(host):
            folder = ROOT / ".matrix" / f"{host}-{version}"
            print(f"== {host} {version}", flush=True)
            try:
                create(host, version, folder)
                codes.append(_record(host, arguments.suite, folder, arguments.processes))
            except NoEnvironmentError as error:
                print(f"Error: {error}", file=sys.stderr)
                codes.append(2)
            finally:
                if not arguments.keep:
                    remove(folder)
    return max(codes, default=0)


def _record(host: str, suite: str, environment: Path, processes: int) -> int:
    if not python_of(environment).exists():
        raise NoEnvironmentError(f"{environment} is not a virtual environment; expected bin/python")
    contract = run_contract(host, environment)
    in_window = TESTED[host].holds(version_of(host, environment))
    outcome = run_suite(suite, environment, in_window=in_window, processes=processes)
    if not outcome.passed + outcome.failed:
        print(f"Error: no test of {host} ran in {environment}; no row is added", file=sys.stderr)
        return 2
    row = row_of(host, suite, environment, outcome)
    put(row)
    print(f"{RECORD.relative_to(ROOT)}: {row}", flush=True)
    return max(contract, int(outcome.exit_code != 0))


if __name__ == "__main__":
    sys.exit(main())
