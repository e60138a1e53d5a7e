"""Prompts of the demo: two tasks whose answers copy from the prompt, where drafting pays most."""

from __future__ import annotations

_FUNCTION = '''\
def monthly_report(orders, month):
    """Sum the orders of one month by customer."""
    totals = {}
    for order in orders:
        if order["month"] != month:
            continue
        customer = order["customer"]
        amount = order["quantity"] * order["price"]
        totals[customer] = totals.get(customer, 0) + amount
    lines = []
    for customer, amount in sorted(totals.items()):
        lines.append(f"{customer}: {amount:.2f}")
    return "\\n".join(lines)'''

_PASSAGE = (
    "The lighthouse of Kullen stands on a ridge above the sea in the south of Sweden. The first "
    "fire on this ridge was lit in 1561 by the astronomer Tycho Brahe, who was paid by the Danish "
    "king to keep it burning through the winter. The present tower was designed by Magnus "
    "Dahlander and was lit for the first time in the autumn of 1900. It is only 15 metres high, "
    "but because the ridge is steep the light stands 78.5 metres above the water, which makes it "
    "the highest placed lighthouse in the country. The lens is the largest in Scandinavia and can "
    "be seen from a distance of 27 nautical miles. The lighthouse became automatic in 1979, and "
    "the keepers left."
)

PROMPTS = {
    "code edit": (
        "Rename the variable `amount` to `value` in this function and print the whole function.\n\n"
        f"```python\n{_FUNCTION}\n```"
    ),
    "questions": (
        f"{_PASSAGE}\n\nWho designed the present tower, how high does the light stand above the "
        "water, and when did the lighthouse become automatic?"
    ),
}
