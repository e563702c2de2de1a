//! The table as Parquet: one row group, no compression; every column may be null.

use std::sync::Arc;

use parquet::basic::{LogicalType, Repetition, Type as Physical};
use parquet::column::writer::ColumnWriter;
use parquet::data_type::ByteArray;
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::Type;

use crate::result::{Cell, JobResult, Value, rows};

/// Returns the bytes of the file.
pub(super) fn encode(result: &JobResult) -> Result<Vec<u8>, ParquetError> {
    let rows = rows(result);
    let header: &[Cell] = rows.first().map_or(&[], Vec::as_slice);
    let schema = Type::group_type_builder("benchkv_result").with_fields(header.iter().map(field).collect::<Result<_, _>>()?).build()?;
    let mut bytes = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut bytes, Arc::new(schema), Arc::new(WriterProperties::new()))?;
    let mut group = writer.next_row_group()?;
    for column in 0..header.len() {
        let Some(mut place) = group.next_column()? else { break };
        write(rows.iter().filter_map(|row| row.get(column)), place.untyped())?;
        place.close()?;
    }
    group.close()?;
    writer.close()?;
    Ok(bytes)
}

fn field(cell: &Cell) -> Result<Arc<Type>, ParquetError> {
    let (physical, logical) = match cell.value {
        Value::Text(_) => (Physical::BYTE_ARRAY, Some(LogicalType::String)),
        Value::Count(_) => (Physical::INT64, Some(LogicalType::integer(64, false))),
        Value::Number(_) => (Physical::DOUBLE, None),
    };
    let field = Type::primitive_type_builder(&cell.column, physical).with_repetition(Repetition::OPTIONAL).with_logical_type(logical);
    Ok(Arc::new(field.build()?))
}

fn write<'a>(cells: impl Iterator<Item = &'a Cell>, place: &mut ColumnWriter<'_>) -> Result<(), ParquetError> {
    let (mut texts, mut counts, mut numbers, mut levels) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for cell in cells {
        let is_there = match &cell.value {
            Value::Text(text) => {
                texts.extend(text.as_deref().map(ByteArray::from));
                text.is_some()
            }
            Value::Count(count) => {
                // The column is declared unsigned: the same 64 bits.
                counts.extend(count.map(|count| count as i64));
                count.is_some()
            }
            Value::Number(number) => {
                numbers.extend(number);
                number.is_some()
            }
        };
        levels.push(i16::from(is_there));
    }
    match place {
        ColumnWriter::ByteArrayColumnWriter(place) => place.write_batch(&texts, Some(&levels), None),
        ColumnWriter::Int64ColumnWriter(place) => place.write_batch(&counts, Some(&levels), None),
        ColumnWriter::DoubleColumnWriter(place) => place.write_batch(&numbers, Some(&levels), None),
        _ => Err(ParquetError::General("a column has another type than its schema".to_owned())),
    }?;
    Ok(())
}
