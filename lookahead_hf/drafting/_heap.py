"""A compiled priority queue of nodes: likeliest first, ties by number.

It is stored backwards from the end of an array (element `i` at `top - i`), whose front its owner
fills with the nodes that leave.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from lookahead_hf.ngram_pool.jit import jit_inner


@jit_inner
def before(a, b, reach):
    """Return whether node `a` leaves the queue before node `b`."""
    return reach[a] > reach[b] or (reach[a] == reach[b] and a < b)


@jit_inner
def push(heap, top, size, node, reach):
    """Add a node; returns the new size."""
    hole = size
    while hole > 0 and before(node, heap[top - (hole - 1) // 2], reach):
        heap[top - hole] = heap[top - (hole - 1) // 2]
        hole = (hole - 1) // 2
    heap[top - hole] = node
    return size + 1


@jit_inner
def pop(heap, top, size, reach):
    """Remove the node at `heap[top]`, which the caller has read; returns the new size."""
    size -= 1
    node = heap[top - size]
    hole = 0
    while True:
        child = 2 * hole + 1
        if child >= size:
            break
        if child + 1 < size and before(heap[top - child - 1], heap[top - child], reach):
            child += 1
        if before(node, heap[top - child], reach):
            break
        heap[top - hole] = heap[top - child]
        hole = child
    if size > 0:
        heap[top - hole] = node
    return size
