// A dashboard's JSON in the words of Grafana's own schema.

import type { Dashboard, Panel, RowPanel, AnnotationQuery, VariableModel } from "@grafana/schema";
import type * as Stat from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen";
import type * as Series from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";
import type * as Timeline from "@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen";
import type * as Heat from "@grafana/schema/dist/esm/raw/composable/statushistory/panelcfg/x/StatusHistoryPanelCfg_types.gen";
import type * as Table from "@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen";
import type * as Graph from "@grafana/schema/dist/esm/raw/composable/nodegraph/panelcfg/x/NodeGraphPanelCfg_types.gen";

// Words is T with the words of an enum in place of the enum, as JSON has them.
type Words<T> = T extends string
  ? `${T}`
  : T extends number | boolean | null | undefined
    ? T
    : T extends Array<infer U>
      ? Array<Words<U>>
      : T extends object
        ? { [K in keyof T]: unknown extends T[K] ? T[K] : Words<T[K]> }
        : T;

type Datasource = { type: "prometheus"; uid: string };

type Target = {
  refId: string;
  expr: string;
  datasource: Datasource;
  legendFormat: string;
  range: boolean;
  instant: boolean;
  exemplar?: boolean;
  format?: "table" | "time_series" | "heatmap";
};

type Plugin<Type extends string, Options, Custom> = Words<
  Omit<Panel<never, never>, "type" | "options" | "fieldConfig" | "targets" | "datasource">
> & {
  type: Type;
  datasource: Datasource;
  targets: Target[];
  options: Words<Partial<Options>>;
  fieldConfig: {
    defaults: Words<Omit<NonNullable<Panel["fieldConfig"]>["defaults"], "custom">> & { custom: Words<Custom> };
    overrides: never[];
  };
};

type None = Record<string, never>;

type Panels =
  | Words<RowPanel>
  | Plugin<"stat", Stat.Options, None>
  | Plugin<"timeseries", Series.Options, Series.FieldConfig>
  | Plugin<"state-timeline", Timeline.Options, Timeline.FieldConfig>
  | Plugin<"status-history", Heat.Options, Heat.FieldConfig>
  | Plugin<"table", Table.Options, Partial<Table.FieldConfig>>
  | Plugin<"nodeGraph", Graph.Options, None>;

export type Checked = Words<Omit<Dashboard, "panels" | "templating" | "annotations">> & {
  panels: Panels[];
  templating: { list: Words<VariableModel & { definition?: string }>[] };
  annotations: { list: Words<AnnotationQuery & { expr?: string; titleFormat?: string }>[] };
};
