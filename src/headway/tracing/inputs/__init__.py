"""Forward arguments for a model that is traced: the forms in which models take images, sound or sources.

A form is a class below `form.InputForm`, and `model_inputs.FORMS` is the table of them. To add a form, write its class
and add it to the table.
"""
