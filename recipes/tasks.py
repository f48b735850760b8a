"""Room recipes: the tasks about hosts: each parses, calls one function, and sets the exit code."""

from invoke import Exit, task

from images.errors import UsageProblem

HOSTS = {
    "host": "hosts or groups, separated by commas; default: all of --inventory, else this machine",
    "inventory": "an Ansible inventory; ansible/inventory/ has examples",
    "set": "NAME=VALUE, a variable of a role; may be repeated",
    "json": "print JSON",
}


@task(help=HOSTS, iterable=["set"])
def doctor(_c, host="", inventory=None, set=None, json=False):  # noqa: A002
    """Look at hosts: every finding with found, wanted and remedy; changes nothing. 8 if something is wrong."""
    from recipes.hosts import doctor

    raise Exit(code=doctor(host, inventory, set, json))


@task(
    help={
        **HOSTS,
        "recipe": "recipe id or family, such as micro/mtp1: serve it there as a service of systemd",
        "image": "NAME@sha256:…, an archive of image.save, or sha256:… of one the hosts have; default: as declared",
        "rollback": "bring back the service before, unit and lock, and do nothing else",
        "check": "say what would change, and change nothing",
    },
    iterable=["set"],
)
def provision(_c, host="", inventory=None, recipe=None, image=None, rollback=False, check=False, set=None, json=False):  # noqa: A002
    """Bring hosts to where they can serve, and serve a recipe there. On DGX OS it installs no packages."""
    from recipes.hosts import provision
    from recipes.provision import provision_recipe, roll_back

    if (rollback and recipe) or (image and not recipe):
        raise UsageProblem("provision takes --recipe NAME (and with it --image), or --rollback, or neither")
    if rollback:
        raise Exit(code=roll_back(host, inventory, set, check, json))
    if recipe:
        raise Exit(code=provision_recipe(recipe, image, host, inventory, set, check, json))
    raise Exit(code=provision(host, inventory, set, check, json))
