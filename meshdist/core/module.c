/* The module `meshdist.core._core`; what it is for is told in `meshdist.core`. */
#include "known_calls.h"

/* Raised with every change of what Python and this module expect of each other. */
enum { INTERFACE = 41 };

#ifdef __clang__
#define COMPILER __VERSION__ /* which has the name as well */
#else
#define COMPILER "GCC " __VERSION__
#endif

static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type)
{
    *type = (PyTypeObject *)PyType_FromSpec(spec);
    return *type == NULL ? -1 : PyModule_AddType(module, *type);
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_core", "The compiled core of meshdist.", -1, call_functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__core(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    if (add_type(module, &barrier_spec, &barrier_type) < 0 || add_type(module, &step_spec, &step_type) < 0
        || add_type(module, &ring_spec, &ring_type) < 0 || add_type(module, &function_spec, &function_type) < 0
        || add_type(module, &calls_spec, &calls_type) < 0 || add_type(module, &try_lock_spec, &try_lock_type) < 0
        || add_type(module, &record_spec, &record_type) < 0
        || add_type(module, &handle_spec, &handle_type) < 0 || PyModule_AddFunctions(module, work_functions) < 0
        || add_type(module, &inbox_spec, &inbox_type) < 0 || PyModule_AddFunctions(module, object_functions) < 0
        || PyModule_AddFunctions(module, copy_functions) < 0 || PyModule_AddFunctions(module, argument_functions) < 0
        || PyModule_AddFunctions(module, distance_functions) < 0 || PyModule_AddFunctions(module, memory_functions) < 0
        || PyModule_AddFunctions(module, spreading_functions) < 0
        || PyModule_AddIntConstant(module, "LINES_BYTES", lines_bytes) < 0
        || add_type(module, &object_sender_spec, &object_sender_type) < 0
        || add_type(module, &exchange_spec, &exchange_type) < 0
        || add_type(module, &chunks_spec, &chunks_type) < 0
        || add_type(module, &stream_spec, &stream_type) < 0 || add_type(module, &single_copy_spec, &single_copy_type) < 0
        || add_type(module, &chosen_spec, &chosen_type) < 0 || add_type(module, &countdown_spec, &countdown_type) < 0
        || add_type(module, &deferring_lock_spec, &deferring_lock_type) < 0
        || PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0
        || PyModule_AddStringConstant(module, "COMPILER", COMPILER) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
