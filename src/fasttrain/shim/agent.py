"""Entry point of the torchrun agent: ``python AGENT [torchrun options] COMMAND...``.

torchrun itself ends with exit code 1 whatever its workers ended with; this one ends with the exit
code of the first worker that failed, or 128 + signal.
"""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # this folder; see __main__.py
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        ended = f"exit code {code}" if failure.exitcode >= 0 else failure.signal_name()
        print(f"fasttrain: rank {rank} failed first, with {ended}", file=sys.stderr)  # noqa: T201
        sys.exit(code)
