"""The command line, called from tests, and what it says to wrong input."""

from emergent_heads import cli


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def complaint(capsys) -> str:
    """What was said on stderr: one line of the program's, and nothing on stdout."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("emergent-heads: ")
    return captured.err
