// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

import type { ComponentChildren } from "preact";

// Column is a title, and how the cells below it look: a number stands at the right, and a name
// may break anywhere.
export type Column = string | [title: string, look: "number" | "name"];

// Row is the cells below the columns. The key tells it from the others.
export type Row = [key: string | number, ...cells: ComponentChildren[]];

export function Table({ columns, rows }: { columns: Column[]; rows: Row[] }) {
  const looks = columns.map((c) => (typeof c === "string" ? undefined : c[1]));
  return (
    <div class="wide">
      <table>
        <thead>
          <tr>
            {columns.map((c, i) => (
              <th key={i} class={looks[i] === "number" ? "number" : undefined}>
                {typeof c === "string" ? c : c[0]}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map(([key, ...cells]) => (
            <tr key={key}>
              {cells.map((cell, i) => (
                <td key={i} class={looks[i]}>
                  {cell}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
