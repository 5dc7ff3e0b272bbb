"""Forward arguments for a model that is traced: one file for each form in which models take images, sound or sources.

A form is a class below `form.InputForm`, and `registry.FORMS` is the table of them. To add a form, write its file and
add its class to the table.
"""
