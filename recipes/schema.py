"""Room recipes: what a recipe may say. Pydantic models; every field's description is its documentation."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StringConstraints, model_validator

RecipeId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]*/[a-z0-9][a-z0-9.-]*$")]
FlagName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9]*(-[a-z0-9]+)*$")]
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$")]
Revision = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
LimitName = Annotated[str, StringConstraints(pattern=r"^[a-z]+$")]
Words = Annotated[list[str], Field(min_length=1)]
FlagValue = bool | int | float | str | Words | dict[str, Any]
Metric = Literal[
    "output_tok_s",
    "acceptance_length",
    "exact_match",
    "gpu_memory_gb",
    "ttft_p95_ms",
    "tpot_p95_ms",
    "discount",
]
Status = Literal["claimed", "measured", "synthetic", "modelled"]


class Part(BaseModel):
    """A part of a recipe: unknown keys are errors, values don't change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Engine(Part):
    """The engine and the flags and environment it gets."""

    image: Text = Field(description="folder under images/ that holds the engine's pins")
    version: Text = Field(description="what the engine must answer on /version")
    substitutes: list[Text] = Field(
        default=[], description="versions that may stand in, in this order; a verdict on one says so"
    )
    flags: dict[FlagName, FlagValue] = Field(
        default={},
        description="`vllm serve` flags as a map: true is --flag, false is --no-flag, maps are JSON",
    )
    env: dict[EnvName, str] = Field(default={}, description="environment variables of the engine, as strings")
    unset: list[str] = Field(default=[], description="inherited flags or variables to drop")


class Model(Part):
    """The model: a folder beside the recipe, or a repository at one confirmed revision."""

    path: Text | None = Field(default=None, description="folder with the checkpoint, relative to the recipe's folder")
    repo: Text | None = Field(default=None, description="repository name on the hub, owner/name")
    revision: Revision | None = Field(default=None, description="full commit of the repository, confirmed by a person")
    architecture: Text | None = Field(default=None, description="the model's class, where a rule depends on it")
    quantization: Text | None = Field(default=None, description="how the weights are stored, such as nvfp4")
    served_name: Text = Field(description="the model name clients ask for")
    dtype: Literal["float32", "bfloat16", "float16"]
    files: dict[Text, Sha256] = Field(default={}, description="sha256 of every file the engine reads")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.repo is None):
            raise ValueError("wanted either path (a folder) or repo (on the hub)")
        if self.path and (self.path.startswith("/") or ".." in self.path.split("/")):
            raise ValueError("path must lie below the recipe's folder")
        if self.path and not self.files:
            raise ValueError("a model folder needs files: the sha256 of each")
        return self


class Runtime(Part):
    """How the engine is run on this machine."""

    kind: Literal["process", "docker"] = Field(
        default="process", description="how the engine is started unless the command line says: --runtime"
    )
    host: Literal["127.0.0.1"] = Field(default="127.0.0.1", description="address; loopback only")
    port: int = Field(default=8000, ge=1024, le=65535)
    ready_timeout_s: int = Field(default=300, ge=1, le=7200, description="deadline for the first real completion")
    stop_timeout_s: int = Field(default=5, ge=1, le=600, description="from SIGTERM to SIGKILL")
    api_key_env: Literal["VLLM_API_KEY"] | None = Field(
        default=None,
        description="the variable that has the engine's API key, for `provision`; its value stands in no output",
    )
    ipc: Literal["private", "host"] = Field(default="private", description="containers: IPC namespace")
    shm_gb: int = Field(default=8, ge=1, le=512, description="containers: size of /dev/shm")
    ulimits: dict[LimitName, int] = Field(default={}, description="containers: resource limits, -1 is unlimited")
    user: int = Field(default=1000, ge=1, description="containers: uid and gid the engine runs as, never root")


# Guards that a recipe can have a reason to fail. What a run is, and whether it is whole, no recipe can waive.
Waivable = Literal[
    "acceptance",
    "client_saturation",
    "cold_engine",
    "degenerate_text",
    "dispatch_delay",
    "gpu_alone",
    "little",
    "peak",
    "power_cap",
    "preemptions",
    "prefix_hits",
    "running",
    "straggler",
    "telemetry_gaps",
    "throttle",
]


class Waiver(Part):
    """A guard that doesn't apply to this recipe, and why. Only a recipe whose figures are synthetic may have one."""

    guard: Waivable
    reason: Text


class Proof(Part):
    """What must be seen for the recipe's settings to count as in effect."""

    must_log: list[Text] = Field(default=[], description="texts that must stand in the server log")
    must_not_log: list[Text] = Field(default=[], description="texts that must not stand in the server log")
    waive: list[Waiver] = []


MOST_BOOTS = 20  # of one run


class Benchmark(Part):
    """The load: a closed loop of `concurrency` streams of exact lengths."""

    prompt_source: Literal["task-stream", "random-text"] = Field(description="what the prompts are made of")
    input_len: int = Field(ge=1, le=131072, description="tokens in, exact")
    output_len: int = Field(ge=2, le=131072, description="tokens out, exact: end-of-sequence is ignored")
    concurrency: int = Field(ge=1, le=4096, description="streams in flight")
    prompts: int = Field(ge=1, le=1_000_000, description="requests a window; a multiple of concurrency, at least 5x")
    temperature: float = Field(ge=0, le=2)
    seed: int = Field(ge=0, description="every window's own seed is derived from it, the warm-up's too")
    boots: int = Field(default=1, ge=1, le=MOST_BOOTS, description="lives of the server: the unit of replication")
    windows: int = Field(default=1, ge=1, le=20, description="measured loads on one boot")


class Quality(Part):
    """The quality suites: items with one right answer, asked at temperature 0."""

    suites: list[Literal["micro-tasks"]] = Field(min_length=1)
    items: int = Field(default=50, ge=1, le=10_000, description="items a task")
    concurrency: int = Field(default=16, ge=1, le=4096)
    seed: int = Field(ge=0, description="which held-out items")


class Claim(Part):
    """A published figure with its definition, tolerance and status."""

    id: Text
    metric: Metric
    scope: Text | None = Field(default=None, description="for exact_match: suite/task, such as micro-tasks/add")
    published: FiniteFloat = Field(gt=0)
    tolerance: FiniteFloat = Field(gt=0, description="absolute, in the metric's unit")
    status: Status
    judge: bool = Field(default=True, description="whether this claim decides the run's state")
    machine: Text = Field(description="slug of the claim's machine, or `any` for a machine-independent figure")
    source: Text


class Delta(Part):
    """The one change a rung makes to the recipe it extends."""

    changes: list[Text] = Field(min_length=1, description="dotted keys this rung changes, and no others")
    reason: Text
    source: Text


class Applies(Part):
    """Where a rung can exist at all; elsewhere it is listed with the reason, not faked."""

    device: Literal["cuda"] = Field(description="the device it needs")
    reason: Text


class Recipe(Part):
    """A recipe, complete: after `extends` has been followed."""

    schema_: Literal[1] = Field(alias="schema")
    id: RecipeId
    title: Text
    status: Literal["measured", "synthetic"] = Field(default="measured", description="what this recipe's figures are")
    extends: RecipeId | None = None
    engine: Engine
    model: Model
    runtime: Runtime
    proof: Proof = Proof()
    benchmark: Benchmark
    quality: Quality | None = None
    choices: dict[Text, Text] = Field(
        default={}, description="dotted keys the publication leaves open, and why this value: our choices"
    )
    claims: list[Claim] = []
    delta: Delta | None = None
    applies: Applies | None = None

    @model_validator(mode="after")
    def _no_hidden_zero(self) -> Self:
        if "\\u0000" in self.model_dump_json():
            raise ValueError("a text holds a zero byte, which no command line can carry")
        return self

    @model_validator(mode="after")
    def _only_synthetic_figures_are_excused(self) -> Self:
        if self.proof.waive and self.status != "synthetic":
            named = ", ".join(waiver.guard for waiver in self.proof.waive)
            raise ValueError(f"proof.waive ({named}): only a recipe with status: synthetic may waive a guard")
        return self

    @model_validator(mode="after")
    def _claims_can_be_judged(self) -> Self:
        suites = self.quality.suites if self.quality else []
        for claim in self.claims:
            if claim.metric == "exact_match" and (claim.scope or "").split("/")[0] not in suites:
                raise ValueError(f"claim {claim.id}: exact_match needs a scope suite/task of one of quality.suites")
        return self

    @property
    def family(self) -> str:
        """The part of the id before the slash."""
        return self.id.split("/")[0]


class Ladder(Part):
    """A family's ladder.yaml: its rungs in order and the rung a bare family name means."""

    schema_: Literal[1] = Field(alias="schema")
    family: Text
    title: Text
    default: Text = Field(description="the rung that a bare family name means")
    machines: list[Text] = Field(description="machine profiles this family is the first choice for, or [any]")
    rungs: list[Text] = Field(min_length=1, description="the published order")


class Match(Part):
    """How a machine is recognised: every given condition must hold of one GPU."""

    pci_ids: list[Text] = []
    gpu_names: list[Text] = []
    memory_mib_min: int | None = None


class Machine(Part):
    """A machine profile: recipes/machines/<name>.yaml."""

    schema_: Literal[1] = Field(alias="schema")
    name: Text
    title: Text
    device: Literal["cuda", "cpu"]
    match: Match
    compute_capability: Text | None = None
    memory_mib: int | None = Field(default=None, description="GPU memory as the driver reports it")
    driver_min: Text | None = None
    env: dict[EnvName, str] = Field(default={}, description="variables every engine on this machine gets")
    source: Text
