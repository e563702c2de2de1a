//! The table as Parquet: one row group, no compression; every column may be null.

use std::sync::Arc;

use parquet::basic::{LogicalType, Repetition, Type as Physical};
use parquet::column::writer::ColumnWriter;
use parquet::data_type::ByteArray;
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::Type;

use crate::result::{Cell, Column, JobResult, Row, Value, columns, rows};

/// Returns the bytes of the file.
pub(super) fn encode(result: &JobResult) -> Result<Vec<u8>, ParquetError> {
    let fields = columns().map(|column| field(&column)).collect::<Result<_, _>>()?;
    let schema = Type::group_type_builder("benchkv_result").with_fields(fields).build()?;
    let mut bytes = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut bytes, Arc::new(schema), Arc::new(WriterProperties::new()))?;
    let mut group = writer.next_row_group()?;
    let rows = rows(result);
    for column in columns() {
        let Some(mut place) = group.next_column()? else { break };
        write(&column, &rows, place.untyped())?;
        place.close()?;
    }
    group.close()?;
    writer.close()?;
    Ok(bytes)
}

fn field(column: &Column) -> Result<Arc<Type>, ParquetError> {
    let (physical, logical) = match column.cell {
        Cell::Text(_) => (Physical::BYTE_ARRAY, Some(LogicalType::String)),
        Cell::Count(_) | Cell::Fate(..) => (Physical::INT64, Some(LogicalType::integer(64, false))),
        Cell::Number(_) | Cell::Figure(_) | Cell::Rate(_) => (Physical::DOUBLE, None),
    };
    let field = Type::primitive_type_builder(&column.name, physical).with_repetition(Repetition::OPTIONAL).with_logical_type(logical);
    Ok(Arc::new(field.build()?))
}

fn write(column: &Column, rows: &[Row<'_>], place: &mut ColumnWriter<'_>) -> Result<(), ParquetError> {
    let cells = || rows.iter().map(|row| column.cell.of(row));
    match place {
        ColumnWriter::ByteArrayColumnWriter(place) => {
            let text = |value| if let Value::Text(text) = value { Some(ByteArray::from(text.into_bytes())) } else { None };
            let (values, levels) = split(cells(), text);
            place.write_batch(&values, Some(&levels), None)?;
        }
        ColumnWriter::Int64ColumnWriter(place) => {
            // The column is declared unsigned: the same 64 bits.
            let (values, levels) = split(cells(), |value| if let Value::Count(count) = value { Some(count as i64) } else { None });
            place.write_batch(&values, Some(&levels), None)?;
        }
        ColumnWriter::DoubleColumnWriter(place) => {
            let (values, levels) = split(cells(), |value| if let Value::Number(number) = value { Some(number) } else { None });
            place.write_batch(&values, Some(&levels), None)?;
        }
        _ => return Err(ParquetError::General(format!("column {} has another type than its schema", column.name))),
    }
    Ok(())
}

/// Returns the values that rows have, and for each row whether it has one.
fn split<T>(cells: impl Iterator<Item = Option<Value>>, get: impl Fn(Value) -> Option<T>) -> (Vec<T>, Vec<i16>) {
    let cells: Vec<Option<T>> = cells.map(|cell| cell.and_then(&get)).collect();
    let levels = cells.iter().map(|cell| i16::from(cell.is_some())).collect();
    (cells.into_iter().flatten().collect(), levels)
}
