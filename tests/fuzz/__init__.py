"""Differential fuzzing: random modules with random options, against the same modules unsharded.

    python -m tests.fuzz --cases 1500 --seed 0     plays cases, and prints a small one of each hundred that fails
    python -m tests.fuzz "Case(blocks=[...])"      plays one

``cases`` says what a case is and draws one, ``model`` builds its module, ``play`` trains it on the ranks and compares.
"""
