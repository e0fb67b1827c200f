"""`fsdp-compile plan`: predict a training step on hardware that is not there, and whether it fits in memory.

    target     the model, from module:function or a Hugging Face config, on meta
    layers     which of its layers repeat; the same model with fewer of them
    joint      the joint graph of a step, traced on a pretended group of ranks
    steps      the steps of a lowered graph, in order, with seconds and bytes by kind
    extend     the steps of a model with more layers, from what each layer added
    forecast   one configuration: peak by kind, seconds, exposed communication, tokens a second
    sweep      many configurations, and the best of them
    options    the command's arguments; show: tables and sentences
"""
