"""The whole shell in virtual time, driven by one seed: shipped code on the store's twin and the fake router.

`plan.py` and `more.py` draw everything from the seed; `process.py` is what may die and the seams to what outlives it;
`serve.py` puts the shipped parts into processes; `front.py` and `owners.py` are who uses them; `box.py` is what else
runs on a card; `trouble.py` what goes wrong; `check.py` and `ending.py` what must hold. `python -m tests.sim --seed N`
replays one.
"""
