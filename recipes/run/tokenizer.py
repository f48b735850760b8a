"""Room recipes: the tokenizer of a model that lies on another machine, read out of the container that serves it."""

from contextlib import closing
from pathlib import Path

from images.errors import EngineProblem
from images.index import cache_root
from images.written import write_whole
from recipes.render import container_name
from recipes.run.docker import connect, run_inside
from recipes.schema import Model
from recipes.spec import CACHE_IN_CONTAINER, ServingSpec
from recipes.weights import snapshot

TOKENIZER = "tokenizer.json"


def fetch_tokenizer(spec: ServingSpec, model: Model) -> Path:
    """A folder of this machine with the tokenizer.json of a repository's model; prompts are made with it.

    Raises EngineProblem where the container that serves the model doesn't have it.
    """
    folder = snapshot(cache_root() / "tokenizers", model)
    if (folder / TOKENIZER).is_file():
        return folder
    with closing(connect()) as client:
        container = client.containers.get(container_name(spec.recipe_id))
        answer = run_inside(container, "cat", f"{snapshot(Path(CACHE_IN_CONTAINER), model)}/{TOKENIZER}")
    if answer.returncode != 0:
        raise EngineProblem(f"{model.repo}: its {TOKENIZER} can't be read in the container: {answer.stderr.strip()}")
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / TOKENIZER, answer.stdout.encode())
    return folder
