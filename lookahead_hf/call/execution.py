"""How the steps of a call are run: the closed list of values of `SpeculativeStats.execution`.

The runner on the host runs the model's own forward; compiled kernels may compute its layers. Why
layers run their own code on a CPU is in `SpeculativeStats.own_code`. A runner on a CUDA device
replays its steps, or gives one of these reasons why it does not. Some reasons are followed by a
colon and a detail.
"""

from __future__ import annotations

MODEL = "model"
COMPILED = "compiled"
REPLAYED = "replayed"
NOT_ASKED_FOR = "not asked for"

# What a call or its model does that no graph can capture.
TENSORS = "the model is passed further tensors"
CAPTURED = "the call itself is being captured"
OFFLOADED = "a hook of accelerate moves tensors"
OWN_GRAPHS = "the model is compiled into graphs already"
READS_LENGTHS = "rotary embeddings depend on the sequence length"
WATCHED = "a torch function or dispatch mode is active"
HOOKS = "modules have hooks"
REPLACED = "a forward was replaced"
STATES = "its layers keep a recurrent state"
WAITS = "a forward waits for the device"

# What speaks against capturing now; a later call may find it otherwise.
NO_GRAPHS = "the device has no graphs"
TOO_SHORT = "the call is too short to capture for"
TOO_LARGE = "K and V take too much memory to keep"
TOO_WIDE = "the draft is wider than the captured steps of so many rows"
TOO_FAR_APART = "rows of a returned cache are too far apart for its windows"
IN_USE = "another call is using the model's graphs"
FAILED = "capturing failed"

CHANGED = "the model was changed in the middle of the call"

# Why layers run their own code on a CPU; so do NOT_ASKED_FOR, WATCHED, HOOKS and CHANGED.
PROCESSES = "several processes run the model"
BY_TORCH = "the model is compiled by torch"
COMPILING = "the kernels are being compiled"
NO_COMPILER = "numba is missing or has failed"
NO_OPENMP = "no OpenMP library runs the kernels on the threads of torch"
UNKNOWN = "there are no kernels for a layer"
DIFFERED = "the results of a layer differed in its first step"
FUNCTIONS = "functions that layers call were replaced"
GRADIENTS = "gradients or autocast are on"
TOO_LARGE_A_BLOCK = "the block has more tokens than the kernels take"
OTHER_NUMBERS = "the input of a layer is not of the type of its weights"
OTHER_CALL = "something else is called in place of a layer"
OTHER_ARGUMENTS = "a layer is not called as in generate"
SLOWER = "the model's own code is faster at this width"
OUT_OF_ORDER = "the layers were not called one after another"
