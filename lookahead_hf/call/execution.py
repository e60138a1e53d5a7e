"""How steps are run: the closed list of values of `SpeculativeStats.execution` and `own_code`.

The runner on the host runs the model's own forward; compiled kernels may compute its layers, or
`own_code` has the reasons against that. A runner on a CUDA device replays its steps or gives a
reason why not. A colon and a detail may follow a reason.
"""

from __future__ import annotations

MODEL = "model"
COMPILED = "compiled"
REPLAYED = "replayed"
NOT_ASKED_FOR = "not asked for"

# No graph can capture the call or its model.
TENSORS = "the model is passed further tensors"
CAPTURED = "the call itself is being captured"
OFFLOADED = "a hook of accelerate moves tensors"
READS_LENGTHS = "rotary embeddings depend on the sequence length"
WATCHED = "a torch function or dispatch mode is active"
HOOKS = "modules have hooks"
REPLACED = "a forward was replaced"
AUTOCAST = "autocast frees what a graph would read"
STATES = "its layers keep a recurrent state"
WAITS = "a forward waits for the device"

# The call is not captured, but later ones may be.
NO_GRAPHS = "the device has no graphs"
TOO_SHORT = "the call is too short to capture for"
TOO_LARGE = "K and V take too much memory to keep"
TOO_WIDE = "the draft is wider than the captured steps of so many rows"
TOO_FAR_APART = "rows of a returned cache are too far apart for its windows"
IN_USE = "another call is using the model's graphs"
FAILED = "capturing failed"

CHANGED = "the model was changed in the middle of the call"

# Layers run their own code on a CPU. NOT_ASKED_FOR, WATCHED, HOOKS and CHANGED are reasons, too.
PROCESSES = "several processes run the model"
COMPILING = "the kernels are being compiled"
PROMPT = "the prompt ran without kernels"
NO_COMPILER = "numba is missing or has failed"
NO_OPENMP = "no OpenMP library runs the kernels on the threads of torch"
UNKNOWN = "unsupported layer"
DIFFERED = "the results of a layer differed in its first step"
FUNCTIONS = "functions that layers call were replaced"
GRADIENTS = "gradients or autocast are on"
TOO_LARGE_A_BLOCK = "the block has more tokens than the kernels take"
OTHER_NUMBERS = "the input of a layer is not of the type of its weights"
OTHER_CALL = "a layer's __call__ was replaced"
OTHER_ARGUMENTS = "a layer is not called as in generate"
NO_ENGINE = "no engine for the device is installed"
OUT_OF_ORDER = "the layers were not called one after another"
