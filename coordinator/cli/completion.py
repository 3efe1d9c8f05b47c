"""``tricord completion``: the script that lets a shell complete the command."""

from __future__ import annotations

import click

_INTO = {
    "bash": '~/.bashrc: eval "$(tricord completion bash)"',
    "zsh": '~/.zshrc, below compinit: eval "$(tricord completion zsh)"',
    "fish": "once: tricord completion fish > ~/.config/fish/completions/tricord.fish",
}


@click.command(epilog="\b\n" + "\n".join(_INTO.values()))
@click.argument("shell", type=click.Choice(list(_INTO)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a shell's completion script.

    So the shell reads it whenever it starts:
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(ctx.find_root().command, {}, "tricord", "_TRICORD_COMPLETE").source())
