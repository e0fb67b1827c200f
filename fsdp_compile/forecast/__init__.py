"""`fsdp-compile plan`: predict a training step on hardware that is not there, and whether it fits in memory.

    target     the model, from module:function or a Hugging Face config, on meta
    layers     which of its layers repeat; the same model with fewer of them
    joint      the joint graph of a step, traced on a pretended group of ranks
    steps      the steps of a lowered graph, in order, with seconds and bytes by kind; those of a model with more layers
    forecast   one configuration: peak by kind, seconds, exposed communication, tokens a second
    sweep      many configurations, and the best of them
    command    its arguments, and running it; show: tables and sentences
"""
