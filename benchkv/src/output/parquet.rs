//! The table as Parquet: one row group, no compression; every column may be null.

use std::sync::Arc;

use parquet::basic::{LogicalType, Repetition, Type as Physical};
use parquet::column::writer::ColumnWriter;
use parquet::data_type::ByteArray;
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::Type;

use crate::result::{Cell, Column, JobResult, Row, columns, rows};

/// The bytes of the file.
pub(super) fn encode(result: &JobResult) -> Result<Vec<u8>, ParquetError> {
    let fields = columns().map(field).collect::<Result<_, _>>()?;
    let schema = Type::group_type_builder("benchkv_result").with_fields(fields).build()?;
    let mut bytes = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut bytes, Arc::new(schema), Arc::new(WriterProperties::new()))?;
    let mut group = writer.next_row_group()?;
    let rows = rows(result);
    for column in columns() {
        let Some(mut place) = group.next_column()? else { break };
        write(column, &rows, place.untyped())?;
        place.close()?;
    }
    group.close()?;
    writer.close()?;
    Ok(bytes)
}

fn field(column: &Column) -> Result<Arc<Type>, ParquetError> {
    let (physical, logical) = match column.cell {
        Cell::Text(_) => (Physical::BYTE_ARRAY, Some(LogicalType::String)),
        Cell::Count(_) => (Physical::INT64, Some(LogicalType::integer(64, false))),
        Cell::Number(_) => (Physical::DOUBLE, None),
    };
    let field = Type::primitive_type_builder(column.name, physical).with_repetition(Repetition::OPTIONAL).with_logical_type(logical);
    Ok(Arc::new(field.build()?))
}

fn write(column: &Column, rows: &[Row<'_>], place: &mut ColumnWriter<'_>) -> Result<(), ParquetError> {
    match (column.cell, place) {
        (Cell::Text(get), ColumnWriter::ByteArrayColumnWriter(place)) => {
            let (values, levels) = split(rows, |row| get(row).map(|text| ByteArray::from(text.into_bytes())));
            place.write_batch(&values, Some(&levels), None)?;
        }
        (Cell::Count(get), ColumnWriter::Int64ColumnWriter(place)) => {
            // The column is declared unsigned: the same 64 bits.
            let (values, levels) = split(rows, |row| get(row).map(|count| count as i64));
            place.write_batch(&values, Some(&levels), None)?;
        }
        (Cell::Number(get), ColumnWriter::DoubleColumnWriter(place)) => {
            let (values, levels) = split(rows, get);
            place.write_batch(&values, Some(&levels), None)?;
        }
        _ => return Err(ParquetError::General(format!("column {} has another type than its schema", column.name))),
    }
    Ok(())
}

/// The values that rows have, and for each row whether it has one.
fn split<T>(rows: &[Row<'_>], get: impl Fn(&Row<'_>) -> Option<T>) -> (Vec<T>, Vec<i16>) {
    let cells: Vec<Option<T>> = rows.iter().map(get).collect();
    let levels = cells.iter().map(|cell| i16::from(cell.is_some())).collect();
    (cells.into_iter().flatten().collect(), levels)
}
