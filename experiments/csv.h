/* Fields of a CSV file. */
#ifndef KV_EXPERIMENTS_CSV_H
#define KV_EXPERIMENTS_CSV_H

#include <stdio.h>

/* Writes one text field, quoted only where RFC 4180 asks for it. */
void kv_csv_put(FILE *f, const char *text);

#endif
